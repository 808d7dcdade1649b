"""Describes machine images once, and renders them for Packer, for EC2 Image Builder and for the tests."""
