"""The records of operators: one file a family.

Names, inputs and attributes are those of ONNX's default domain, opset 13 to 23, with three
differences. A dtype is an attribute of its name (Cast has to="float32"). ConstantOfShape has
`value`, a number, and `dtype`. Conv, ConvTranspose and Linear have `post_ops`
(lowering/products.py).
"""
