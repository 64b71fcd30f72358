"""What the module `kt_kernel` offers SGLang, on Tandem's experts. The module itself is a distribution of its own."""
