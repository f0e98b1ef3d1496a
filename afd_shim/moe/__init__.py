"""The Attention side of a MoE layer, and the ownership rules both roles share."""
