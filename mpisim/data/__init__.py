"""What is trained on and in what order: texts as tokens, synthetic rows, the sampler.

    load.py            a config -> a data set: the one place that knows every kind
    batch.py           what a data set delivers
    splits.py          what every data set does alike for its two splits
    text.py            windows of bytes for the MLP
    documents.py       documents for the decoder; rows.py cuts them into packed or padded rows
    load_documents.py  documents from files
    synthetic.py       seeded rows and documents
    corpus.py          the files themselves; tokens.py: files of token ids
    tokenizer.py       bytes and special tokens
    heldout.py         which documents are held out
    baselines.py       losses of models with little context, from counts
    sampler.py         which rows make up which step
    footprint.py       bytes of batches and of sampling, from sizes alone
    arrays.py          index arithmetic

Every rank loads the same data and reads its own rows; nothing here sends a message.
"""
