"""Training data of language models: text and chats as token sequences, packed into rows of one length."""
