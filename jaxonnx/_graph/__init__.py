"""A ModelProto with everything looked up once, and what its graph says of tensors."""
