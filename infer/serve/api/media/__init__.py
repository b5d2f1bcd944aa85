"""Images and sound: files in requests, predictions, transcripts."""
