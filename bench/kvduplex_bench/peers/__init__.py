"""The same requests through other benchmark clients: whether they see what ours sees."""
