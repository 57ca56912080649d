//! Load generator for any OpenAI endpoint.
