"""Shared by all tests."""

import os
import sysconfig

# Before anything imports huggingface_hub, which reads it once: no test needs the network, and none may use it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# torch.utils.cpp_extension calls `ninja`, which lies beside Python where the environment is not activated.
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
