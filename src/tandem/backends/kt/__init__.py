"""The module `kt_kernel` as SGLang calls it, on Tandem's experts. The module itself is a distribution of its own."""
