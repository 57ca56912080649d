//! Checks a request of the workload, and converts it into requests for the dispatcher and the engines.

use slipstream_base::mix::mix64;
use slipstream_base::{BlockHash, EncoderInput, Prompt, WorkerId};
use slipstream_dispatch as dispatch;
use slipstream_workload::Request;
use slipstream_workload::prompt::answer_name;

/// A request in the dispatcher's form.
pub(crate) fn dispatch_request(
    request: &Request,
    prompt: Prompt,
    direct: Option<WorkerId>,
) -> dispatch::Request {
    dispatch::Request {
        prompt,
        max_tokens: request.output_len,
        session: Some(request.session),
        direct,
        only: None,
        streams_input: false,
        whole: false,
        resumes: true,
        answered: 0,
    }
}

/// Refuses a request whose prompt and answer do not fit into the model, as the server does.
pub(crate) fn check_length(request: &Request, context_max: u32) -> Result<(), String> {
    let (prompt, answer) = (request.prompt.tokens(), request.output_len);
    let room = context_max.saturating_sub(prompt);
    if room > 0 && answer <= room {
        return Ok(());
    }
    Err(format!(
        "the model's maximum context length is {context_max} tokens, but the request has {} ({prompt} in the \
         prompt, {answer} for the answer); shorten the requests or raise `max_model_len`",
        u64::from(prompt) + u64::from(answer)
    ))
}

/// The prompt of a request in blocks; its answer is named after it, so that a later turn hits it.
pub(crate) fn prompt_of(
    request: &Request,
    block_size: u32,
    root: BlockHash,
) -> Result<Prompt, String> {
    let name = answer_name(request.id());
    let root = root_of(request, root);
    let prompt = request.prompt.to_blocks(block_size, root, name);
    prompt.map_err(|error| error.to_string())
}

/// The images of a request, for the encoder.
pub(crate) fn encoder_inputs(request: &Request) -> Box<[EncoderInput]> {
    let images = request.images;
    let each = 0..images.count;
    // An image of one turn is in the prompts of all later ones.
    let input = |i: u32| EncoderInput {
        id: mix64(mix64(request.session) ^ u64::from(i)),
        offset: images.offset + i * images.tokens,
        tokens: images.tokens,
    };
    each.map(input).collect()
}

/// Root of a request's blocks: each adapter has its own.
pub(crate) fn root_of(request: &Request, root: BlockHash) -> BlockHash {
    match request.adapter {
        0 => root,
        adapter => root.child_of_id(adapter, u64::MAX),
    }
}

/// Seed of the answer to `request`, in a run with this `seed`.
pub(crate) fn request_seed(seed: u64, request: &Request) -> u64 {
    mix64(seed ^ request.id().0)
}
