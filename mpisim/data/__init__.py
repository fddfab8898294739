"""What is trained on and in what order: texts as tokens, synthetic rows, the sampler.

Every rank loads the same data and reads its own rows; nothing here sends a message. `load_data`
in `load` turns a config into a data set; `sampler` says which rows make up which step.
"""
