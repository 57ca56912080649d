//! OpenAI HTTP and SSE, tokenizer, chat templates, admission.
