"""Files of a model directory that several rooms read: their names and their fields, without tensors."""
