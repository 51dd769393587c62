"""The reward functions that ship with the program, registered in the order in which tables list them."""

from backend.rewards.functions import r1 as r1  # isort: skip
from backend.rewards.functions import answers as answers  # isort: skip
from backend.rewards.functions import formats as formats  # isort: skip
from backend.rewards.functions import code as code  # isort: skip
from backend.rewards.functions import judge as judge  # isort: skip
