"""What each role does with a DataProto, in whatever process it lives."""
