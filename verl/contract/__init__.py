"""What stands behind DataProto: who made a field, what its content must be, how rows join and are stored."""
