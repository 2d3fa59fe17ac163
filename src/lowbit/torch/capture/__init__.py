"""A PyTorch model as a `lowbit.graph.Graph`: exported by torch.export, translated into ONNX's
operators. One file a family of operators, in operators/."""
