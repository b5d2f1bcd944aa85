"""HTTP: listening, message framing, flow control, routing and limits."""
