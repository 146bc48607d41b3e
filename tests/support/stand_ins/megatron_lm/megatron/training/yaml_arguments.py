import json
from types import SimpleNamespace

import torch
import yaml


def load_yaml(path):
    with open(path) as file:
        found = json.loads(json.dumps(yaml.safe_load(file)), object_hook=lambda item: SimpleNamespace(**item))
    found.yaml_cfg = path
    return found


def validate_yaml(args, defaults=None):
    """As in core_v0.16.1, it asks for a name beside the sections that may only stand in one."""
    assert torch.cuda.get_device_capability()[0] >= 8
    return args.account_for_embedding_in_pipeline_split
