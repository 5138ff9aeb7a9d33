"""What stands behind DataProto: who made a field, what it must hold, what is equal, how rows join and travel."""
