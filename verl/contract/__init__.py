"""What stands behind DataProto: who made a field, what it must hold, which values are equal, how rows join, travel."""
