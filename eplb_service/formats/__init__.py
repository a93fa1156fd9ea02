"""Files of engines: loads that they recorded, placements that they start from. One module a format, two registries.

    loads.py       finds out what a load file is, and reads it:  sglang_dump, trtllm_statistics, plain_loads
    placements.py  the same for placements, and writes them:     eplb_json, sglang_map, trtllm_yaml, vllm_ascend_map
    files.py, torch_file.py, safetensors_file.py                 bytes on disk -> plain trees of numpy arrays, nothing trusted

The modules of formats are pure: they take trees that were read, and refuse with InvalidInputError and one sentence.
"""
