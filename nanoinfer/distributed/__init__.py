"""Who the ranks are and how they speak. The only room that may import torch.distributed."""
