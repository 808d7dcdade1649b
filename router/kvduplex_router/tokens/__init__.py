"""A request's prompt as token ids, worked out as its engine will work it out."""
