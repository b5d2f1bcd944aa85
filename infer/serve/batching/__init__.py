"""Dynamic batching of tensor requests: admission, queue, collation and executors."""
