"""What the settings of reuse should be on the engines at hand: measured costs, and what follows from them."""
