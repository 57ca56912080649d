//! A request as an engine sees it: no text, no HTTP.

use std::sync::Arc;

use crate::ids::RequestId;
use crate::token::{BlockHash, TokenId};
use crate::width::to_u32;

/// A prompt as hashed blocks. The engine needs no token of a full block: identity is in its hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    len: u32,
    block_size: u32,
    root: BlockHash,
    /// Shared: the request and the accounting of its blocks both hold it until the first token.
    blocks: Arc<[BlockHash]>,
    tail: Tail,
    /// Tokens of the full blocks, if KV events need them.
    block_tokens: Option<Arc<[TokenId]>>,
}

/// The part after the last full block of a prompt; decides how the first generated block is hashed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tail {
    /// The tokens of the partial block. Shape `[len % block_size]`. Generated blocks are hashed
    /// over tokens, so a later prompt that repeats the answer hits them.
    Tokens(Box<[TokenId]>),
    /// Tokens unknown (a trace of ids). Generated block `j` is hashed as `(id, j)`.
    Opaque {
        /// Names the request in hashes; equal ids give equal generated blocks.
        id: u64,
    },
}

/// Why a [`Prompt`] could not be built. An error of the caller; a retry does not help.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PromptError {
    /// No tokens at all.
    #[error("the prompt has no tokens; an engine needs at least one to compute a logit")]
    Empty,
    /// The parts disagree about the length.
    #[error(
        "a prompt of {len} tokens in blocks of {block_size} has {} full blocks and a tail of {}, \
         but {blocks} and {tail} were given",
        len / block_size, len % block_size
    )]
    Shape {
        /// Tokens of the prompt.
        len: u32,
        /// Tokens per block.
        block_size: u32,
        /// Hashes that were given.
        blocks: usize,
        /// Tail tokens that were given.
        tail: usize,
    },
    /// Blocks cannot have 0 tokens.
    #[error("block_size is 0; set `engine.block_size` to 16 or more")]
    BlockSize,
}

impl Prompt {
    /// Hashes `tokens` in blocks of `block_size`, chained from `root`.
    ///
    /// # Errors
    /// [`PromptError::Empty`], [`PromptError::BlockSize`].
    pub fn from_tokens(
        tokens: &[TokenId],
        block_size: u32,
        root: BlockHash,
    ) -> Result<Prompt, PromptError> {
        if block_size == 0 {
            return Err(PromptError::BlockSize);
        }
        let blocks = root.chain(tokens, block_size);
        let tail = &tokens[blocks.len() * block_size as usize..];
        let prompt = Prompt::from_parts(
            to_u32(tokens.len()),
            block_size,
            blocks.into(),
            Tail::Tokens(tail.into()),
        )?;
        Ok(prompt.with_root(root))
    }

    /// A prompt of `len` tokens whose full blocks are already hashed, chained from
    /// `BlockHash::default()`; [`with_root`](Prompt::with_root) names another root.
    ///
    /// # Errors
    /// [`PromptError`] if it is empty or the shapes disagree.
    pub fn from_parts(
        len: u32,
        block_size: u32,
        blocks: Box<[BlockHash]>,
        tail: Tail,
    ) -> Result<Prompt, PromptError> {
        if len == 0 {
            return Err(PromptError::Empty);
        }
        if block_size == 0 {
            return Err(PromptError::BlockSize);
        }
        let tail_len = match &tail {
            Tail::Tokens(tokens) => tokens.len(),
            Tail::Opaque { .. } => (len % block_size) as usize,
        };
        if blocks.len() != (len / block_size) as usize || tail_len != (len % block_size) as usize {
            return Err(PromptError::Shape {
                len,
                block_size,
                blocks: blocks.len(),
                tail: tail_len,
            });
        }
        Ok(Prompt {
            len,
            block_size,
            root: BlockHash::default(),
            blocks: blocks.into(),
            tail,
            block_tokens: None,
        })
    }

    /// The same prompt, with the tokens of its full blocks kept, 4 bytes each. KV events that name
    /// tokens need them; engines and routers do not. `tokens` are those of the whole prompt.
    ///
    /// # Errors
    /// [`PromptError::Shape`] if their number differs from the prompt's length.
    pub fn with_block_tokens(mut self, tokens: &[TokenId]) -> Result<Prompt, PromptError> {
        if tokens.len() != self.len as usize {
            return Err(PromptError::Shape {
                len: self.len,
                block_size: self.block_size,
                blocks: tokens.len() / self.block_size as usize,
                tail: tokens.len() % self.block_size as usize,
            });
        }
        let full = self.blocks.len() * self.block_size as usize;
        self.block_tokens = Some(tokens[..full].into());
        Ok(self)
    }

    /// Tokens of the full blocks, if they were kept. Shape `[blocks * block_size]`.
    pub fn block_tokens(&self) -> Option<&[TokenId]> {
        self.block_tokens.as_deref()
    }

    /// The same prompt, with `root` as the hash that its first block was chained from.
    #[must_use]
    pub fn with_root(mut self, root: BlockHash) -> Prompt {
        self.root = root;
        self
    }

    /// This prompt followed by `more`: full blocks keep their hashes, new ones are chained to them.
    /// `None` if the tokens of the tail are not known, or the length exceeds 32 bits.
    pub fn extended(&self, more: &[TokenId]) -> Option<Prompt> {
        let Tail::Tokens(tail) = &self.tail else {
            return None;
        };
        let len = self.len.checked_add(u32::try_from(more.len()).ok()?)?;
        let open = [tail, more].concat();
        let parent = self.blocks.last().copied().unwrap_or(self.root);
        let fresh = parent.chain(&open, self.block_size);
        let full = fresh.len() * self.block_size as usize;
        let block_tokens = self
            .block_tokens
            .as_ref()
            .map(|known| [&known[..], &open[..full]].concat().into());
        Some(Prompt {
            len,
            block_size: self.block_size,
            root: self.root,
            blocks: [&self.blocks[..], &fresh].concat().into(),
            tail: Tail::Tokens(open[full..].into()),
            block_tokens,
        })
    }

    /// This prompt followed by `count` tokens that are not known, as a router sees them. Their blocks are
    /// hashed as those of an opaque tail; `id` names the tokens if the tail has no name.
    #[must_use]
    pub fn lengthened(&self, count: u32, id: u64) -> Prompt {
        let id = match self.tail {
            Tail::Opaque { id } => id,
            Tail::Tokens(_) => id,
        };
        let len = self.len.saturating_add(count);
        let mut blocks = self.blocks.to_vec();
        let mut parent = blocks.last().copied().unwrap_or(self.root);
        for j in to_u32(self.blocks.len())..len / self.block_size {
            parent = parent.child_of_id(id, u64::from(j));
            blocks.push(parent);
        }
        Prompt {
            len,
            block_size: self.block_size,
            root: self.root,
            blocks: blocks.into(),
            tail: Tail::Opaque { id },
            block_tokens: None,
        }
    }

    /// Root of the chain: the parent of the first block. In a prompt shorter than a block,
    /// generated tokens complete that block.
    pub fn root(&self) -> BlockHash {
        self.root
    }

    /// Number of tokens, at least 1.
    #[allow(clippy::len_without_is_empty)] // never empty, by construction
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Tokens per block.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Hashes of the full blocks, in order. Shape `[len / block_size]`.
    pub fn blocks(&self) -> &[BlockHash] {
        &self.blocks
    }

    /// [`blocks`](Self::blocks), shared instead of copied.
    pub fn shared_blocks(&self) -> Arc<[BlockHash]> {
        Arc::clone(&self.blocks)
    }

    /// Memory that copies of it share, bytes: hashes and tokens of full blocks.
    pub fn bytes(&self) -> u64 {
        let tokens = self.block_tokens.as_deref().unwrap_or_default();
        (size_of_val(&*self.blocks) + size_of_val(tokens)) as u64
    }

    /// The part after the last full block.
    pub fn tail(&self) -> &Tail {
        &self.tail
    }
}

/// How much to generate, in vLLM's and OpenAI's terms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GenerationParams {
    /// Limit of tokens to generate; at least 1. The driver has already applied the model's limit.
    pub max_tokens: u32,
    /// Minimum of tokens before the end-of-sequence token or a stop token may end the sequence.
    pub min_tokens: u32,
    /// Generate `max_tokens` tokens whatever the natural length is.
    pub ignore_eos: bool,
    /// Tokens that end the sequence when generated (the token is emitted, as vLLM does).
    pub stop_token_ids: Box<[TokenId]>,
    /// Tokens of the answer that another worker has generated, fewer than `max_tokens`. The engine computes
    /// them with the prompt, and continues behind them. The limits above count them.
    pub answered: u32,
    /// The LoRA adapter ([`adapter_id`]) that generates them; 0: the model itself.
    pub adapter: u64,
    /// Images and other inputs of an encoder whose outputs stand in the prompt: in order, apart from each other.
    pub encoder_inputs: Box<[EncoderInput]>,
}

/// An input of a multimodal model's encoder, such as an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EncoderInput {
    /// Inputs of equal content have equal ids.
    pub id: u64,
    /// Its first placeholder token in the prompt.
    pub offset: u32,
    /// Number of its placeholder tokens, at least 1: the encoder's outputs.
    pub tokens: u32,
}

impl EncoderInput {
    /// The token behind its last one.
    pub fn end(&self) -> u32 {
        self.offset.saturating_add(self.tokens)
    }
}

/// Number of the LoRA adapter `name` that is stored at `path`: equal ones have equal numbers, in all processes.
pub fn adapter_id(name: &str, path: &str) -> u64 {
    BlockHash::root("", name, path).0.max(1)
}

impl Default for GenerationParams {
    fn default() -> Self {
        GenerationParams {
            max_tokens: 16,
            min_tokens: 0,
            ignore_eos: false,
            stop_token_ids: [].into(),
            answered: 0,
            adapter: 0,
            encoder_inputs: [].into(),
        }
    }
}

/// A request, ready for an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineRequest {
    /// Unique among the engine's live requests.
    pub id: RequestId,
    /// The prompt to compute.
    pub prompt: Prompt,
    /// Limits of the answer.
    pub params: GenerationParams,
    /// Under priority scheduling, a lower number is scheduled first; ties by arrival. As in vLLM.
    pub priority: i32,
    /// Decides the content and the natural length of the answer: same seed, same answer.
    pub seed: u64,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FinishReason {
    /// Natural end, or a stop token.
    Stop = 0,
    /// `max_tokens` or the model's length was reached.
    Length = 1,
    /// Cancelled by its client or its driver.
    Abort = 2,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tail_is_what_follows_the_full_blocks() {
        let tokens: Vec<u32> = (0..40).collect();
        let prompt = Prompt::from_tokens(&tokens, 16, BlockHash(1)).unwrap();
        assert_eq!(prompt.blocks().len(), 2);
        assert_eq!(prompt.tail(), &Tail::Tokens(tokens[32..].into()));
        assert_eq!(prompt.root(), BlockHash(1));
        assert_eq!(prompt.block_tokens(), None);
        let prompt = prompt.with_block_tokens(&tokens).unwrap();
        assert_eq!(prompt.block_tokens(), Some(&tokens[..32]));
        assert!(prompt.with_block_tokens(&tokens[1..]).is_err());
    }

    #[test]
    fn a_prompt_that_goes_on_is_the_prompt_of_all_its_tokens() {
        let tokens: Vec<u32> = (0..70).collect();
        let whole = |tokens: &[u32]| {
            let prompt = Prompt::from_tokens(tokens, 16, BlockHash(1)).unwrap();
            prompt.with_block_tokens(tokens).unwrap()
        };
        for cut in 1..tokens.len() {
            let extended = whole(&tokens[..cut]).extended(&tokens[cut..]);
            assert_eq!(extended, Some(whole(&tokens)), "cut at {cut}");
        }
        let opaque = Prompt::from_parts(3, 16, [].into(), Tail::Opaque { id: 0 }).unwrap();
        assert_eq!(opaque.extended(&[1]), None);
    }

    #[test]
    fn a_lengthened_prompt_keeps_its_blocks_and_names_the_new_ones() {
        let prompt = Prompt::from_tokens(&(0..40).collect::<Vec<_>>(), 16, BlockHash(1)).unwrap();
        let longer = prompt.lengthened(25, 9);
        assert_eq!((longer.len(), longer.blocks().len()), (65, 4));
        assert_eq!(longer.blocks()[..2], *prompt.blocks());
        assert_ne!(longer, prompt.lengthened(25, 10), "answers differ");
        // In two steps as in one.
        assert_eq!(prompt.lengthened(12, 9).lengthened(13, 9), longer);
        // A trace's id names its answer too, as in an engine.
        let opaque = Prompt::from_parts(16, 16, [BlockHash(5)].into(), Tail::Opaque { id: 7 });
        let longer = opaque.unwrap().lengthened(16, 9);
        assert_eq!(longer.blocks()[1], BlockHash(5).child_of_id(7, 1));
    }

    #[test]
    fn shapes_are_checked() {
        let err = Prompt::from_parts(40, 16, [BlockHash(1)].into(), Tail::Opaque { id: 0 });
        assert_eq!(
            err,
            Err(PromptError::Shape {
                len: 40,
                block_size: 16,
                blocks: 1,
                tail: 8
            })
        );
        assert_eq!(
            Prompt::from_tokens(&[], 16, BlockHash(1)),
            Err(PromptError::Empty)
        );
        assert_eq!(
            Prompt::from_tokens(&[1], 0, BlockHash(1)),
            Err(PromptError::BlockSize)
        );
    }
}
