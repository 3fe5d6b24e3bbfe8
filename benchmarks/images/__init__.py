"""Image classification with DeiT's recipe, on folders of images such as ImageNet-100."""
