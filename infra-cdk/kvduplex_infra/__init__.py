"""A kvduplex cluster on AWS: a typed cluster file in, CloudFormation stacks out."""
