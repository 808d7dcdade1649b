"""What a machine of an AWS cluster tells its Auto Scaling group, its stack and CloudWatch about itself."""
