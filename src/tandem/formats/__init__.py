"""Weight formats in plain torch, without a checkpoint and without kernels: what codes and scales mean, exactly."""
