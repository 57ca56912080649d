//! A prompt as segments of named texts.
//!
//! A text is an endless sequence of words, fixed by its id: word `k` of text `t` is a pure function
//! of `(t, k)`. A segment is the first tokens of one text. Two prompts share a prefix exactly as
//! far as their segments are equal, live (words are sent) and simulated (only hashes are made).

use slipstream_base::mix::{below, draw};
use slipstream_base::request::PromptError;
use slipstream_base::width;
use slipstream_base::{BlockHash, Prompt, RequestId, Tail};

/// The speaker, for chat endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// The shared prefix, if there is one.
    System,
    /// New text of a turn.
    User,
    /// An earlier answer.
    Assistant,
}

/// Content of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Content {
    /// The first tokens of the text with this id.
    Text(u64),
    /// The answer to this request.
    Answer(RequestId),
}

/// A piece of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Segment {
    /// Its content.
    pub content: Content,
    /// Its length, tokens.
    pub tokens: u32,
    /// Its speaker.
    pub role: Role,
}

/// Words that are one token each for the server under test, written with a space before.
///
/// Any list gives the same workload; only a list for the server's tokenizer gives prompts of the
/// exact length.
#[derive(Clone, Debug)]
pub struct Vocabulary {
    words: Vec<String>,
}

impl Vocabulary {
    /// A vocabulary of these words, without leading spaces. `None` if there are none.
    pub fn new<S: Into<String>>(words: impl IntoIterator<Item = S>) -> Option<Vocabulary> {
        let words: Vec<String> = words.into_iter().map(Into::into).collect();
        (!words.is_empty()).then_some(Vocabulary { words })
    }

    /// Frequent short English words: one token each, with the space before, in widely used
    /// byte-pair vocabularies.
    pub fn english() -> Vocabulary {
        const WORDS: &str = "about after again air all also always and another any are around as \
            ask at away back be because been before began being below best better between big \
            book both boy but by call came can car carry change city close cold come could \
            country cut day did different do does done door down draw each early earth eat end \
            enough even every eye face fact family far farm father feel few find fire first fish \
            five follow food for form found four friend from full game gave get girl give go good \
            got great group grow had half hand hard has have he head hear help her here high him \
            his hold home horse hot hour house idea if important in into is it just keep kind \
            king knew know land large last late learn leave left let letter life light like line \
            list little live long look love made make man many map mark may me mean men might \
            mile mind money moon more morning most mother move much music must my name near need \
            never new next night no north not note nothing now number of off often oil old on \
            once one only open or order other our out over own page paper part pass people person \
            place plain plan plant play point power problem put question quick rain ran reach \
            read real red rest right river road rock room round rule run said same saw say school \
            sea second see seem self sentence set seven several she ship short should show \
            side simple since sing sit six size sleep slow small snow so some song soon sound \
            south space special stand star start state stay step still stood stop story street \
            strong study such sun sure table take talk teach tell ten than that the their them \
            then there these they thing think this those though thought thousand three through \
            time to together told too took top toward town travel tree true try turn two under \
            unit until up upon us use very voice wait walk want war warm was watch water way we \
            week well went were west what wheel when where which while white who whole why wild \
            will wind with without wood word work world would write year yes yet you young your";
        Vocabulary {
            words: WORDS.split_ascii_whitespace().map(str::to_owned).collect(),
        }
    }

    /// Number of words; at least 1.
    #[allow(clippy::len_without_is_empty)] // never empty, by construction
    pub fn len(&self) -> usize {
        self.words.len()
    }

    /// Appends the first `tokens` words of text `id`, each after a space.
    pub fn write_text(&self, id: u64, tokens: u32, out: &mut String) {
        for k in 0..u64::from(tokens) {
            out.push(' ');
            out.push_str(&self.words[word_index(id, k, self.words.len() as u64)]);
        }
    }
}

/// Appends the first `tokens` token ids of text `id`, within `ids`.
pub fn write_token_ids(id: u64, tokens: u32, ids: std::ops::Range<u32>, out: &mut Vec<u32>) {
    let n = u64::from(ids.end.saturating_sub(ids.start));
    out.extend((0..u64::from(tokens)).map(|k| ids.start + width::to_u32(below(draw(id, k), n))));
}

fn word_index(id: u64, k: u64, n: u64) -> usize {
    width::to_usize(below(draw(id, k), n))
}

/// A prompt as its segments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptSource {
    segments: Vec<Segment>,
}

impl PromptSource {
    /// A prompt of these segments; empty ones are dropped.
    pub fn new(segments: impl IntoIterator<Item = Segment>) -> PromptSource {
        PromptSource {
            segments: segments.into_iter().filter(|s| s.tokens > 0).collect(),
        }
    }

    /// The segments in order.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Total length, tokens.
    pub fn tokens(&self) -> u32 {
        self.segments.iter().map(|s| s.tokens).sum()
    }

    /// Appends the whole prompt as text; `answer` returns the text of an earlier answer.
    pub fn write_text<'a>(
        &self,
        vocabulary: &Vocabulary,
        answer: impl Fn(RequestId) -> Option<&'a str>,
        out: &mut String,
    ) {
        for segment in &self.segments {
            segment.write_text(vocabulary, &answer, out);
        }
    }

    /// Hashes of the full blocks of the prompt, chained from `root`, for a simulated engine.
    ///
    /// A block within one segment, at a whole number of blocks from its start, hashes as `(parent,
    /// id, number of the block in the segment)`: for a trace, "block `j` of id `i`". A block that
    /// ends in an earlier answer hashes as `(parent, name of the answer, number of the block in the
    /// prompt)`, as in the engine that generated it ([`Tail::Opaque`] with [`answer_name`]). Any
    /// other block hashes the runs of segments that it covers, in order. So blocks are equal if and
    /// only if their texts and positions are.
    ///
    /// `id` names the future answer: [`answer_name`] of the request.
    ///
    /// # Errors
    /// [`PromptError`] if the prompt is empty or `block_size` is 0.
    pub fn to_blocks(
        &self,
        block_size: u32,
        root: BlockHash,
        id: u64,
    ) -> Result<Prompt, PromptError> {
        self.hash(&Begun::at(root), block_size, id)
            .map(|(prompt, _)| prompt)
    }

    /// The same prompt, of which the first segments are hashed already, and the end of its last block.
    pub(crate) fn hash(
        &self,
        begun: &Begun<'_>,
        block_size: u32,
        id: u64,
    ) -> Result<(Prompt, BlockEnd), PromptError> {
        if block_size == 0 {
            return Err(PromptError::BlockSize);
        }
        let mut blocks = Vec::with_capacity((self.tokens() / block_size) as usize);
        blocks.extend_from_slice(begun.blocks);
        let rest = &self.segments[begun.segments..];
        let end = hash_segments(rest, begun.root, begun.end, block_size, &mut blocks);
        let tail = Tail::Opaque { id };
        let prompt = Prompt::from_parts(self.tokens(), block_size, blocks.into(), tail)?;
        Ok((prompt.with_root(begun.root), end))
    }
}

/// The first segments of a prompt, hashed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Begun<'a> {
    /// How many there are.
    pub(crate) segments: usize,
    /// The parent of the first block.
    pub(crate) root: BlockHash,
    /// Their full blocks.
    pub(crate) blocks: &'a [BlockHash],
    pub(crate) end: BlockEnd,
}

impl Begun<'_> {
    /// None of them.
    pub(crate) fn at(root: BlockHash) -> Begun<'static> {
        Begun {
            segments: 0,
            root,
            blocks: &[],
            end: BlockEnd {
                hash: root,
                filled: 0,
            },
        }
    }
}

/// The block that a segment ends in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockEnd {
    /// Hash of what is in it; if it is full, of the block.
    pub(crate) hash: BlockHash,
    /// Tokens in it; 0 if it is full.
    pub(crate) filled: u32,
}

/// Appends the hashes of the full blocks of `segments` to `blocks`, which has those before, chained from `root`; they end
/// as `end` says.
pub(crate) fn hash_segments(
    segments: &[Segment],
    root: BlockHash,
    end: BlockEnd,
    block_size: u32,
    blocks: &mut Vec<BlockHash>,
) -> BlockEnd {
    let BlockEnd {
        mut hash,
        mut filled,
    } = end;
    let mut parent = blocks.last().copied().unwrap_or(root);
    for segment in segments {
        let name = segment.name();
        let mut offset = 0;
        while offset < segment.tokens {
            let run = (block_size - filled).min(segment.tokens - offset);
            if run == block_size && offset % block_size == 0 {
                hash = parent.child_of_id(name, u64::from(offset / block_size));
            } else {
                // The top bit keeps runs apart from whole blocks.
                let place = 1 << 63 | u64::from(offset) << 31 | u64::from(run);
                hash = hash.child_of_id(name, place);
            }
            filled += run;
            offset += run;
            if filled == block_size {
                if let Content::Answer(_) = segment.content {
                    hash = parent.child_of_id(name, blocks.len() as u64);
                }
                blocks.push(hash);
                (parent, filled) = (hash, 0);
            }
        }
    }
    BlockEnd { hash, filled }
}

/// A number that identifies the answer to `request` in hashes.
pub fn answer_name(request: RequestId) -> u64 {
    // Distinct from texts, whose ids are mixed: a request's number is small.
    draw(0xa25_3e12, request.0)
}

impl Segment {
    /// Appends the segment as text; `answer` returns the text of an earlier answer. If it returns
    /// none, a made-up text of the same length is used.
    pub fn write_text<'a>(
        &self,
        vocabulary: &Vocabulary,
        answer: &impl Fn(RequestId) -> Option<&'a str>,
        out: &mut String,
    ) {
        match self.content {
            Content::Text(id) => vocabulary.write_text(id, self.tokens, out),
            Content::Answer(request) => match answer(request) {
                Some(text) => out.push_str(text),
                None => vocabulary.write_text(self.name(), self.tokens, out),
            },
        }
    }

    /// A number that identifies the content in hashes.
    pub fn name(&self) -> u64 {
        match self.content {
            Content::Text(id) => id,
            Content::Answer(request) => answer_name(request),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn segment(id: u64, tokens: u32) -> Segment {
        Segment {
            content: Content::Text(id),
            tokens,
            role: Role::User,
        }
    }

    fn text(prompt: &PromptSource) -> String {
        let mut out = String::new();
        prompt.write_text(&Vocabulary::english(), |_| None, &mut out);
        out
    }

    #[test]
    fn english_has_no_word_twice() {
        let words = Vocabulary::english().words;
        assert_eq!(words.iter().collect::<HashSet<_>>().len(), words.len());
    }

    #[test]
    fn text_has_one_word_a_token_and_a_prefix_is_a_prefix() {
        let (long, short) = (
            PromptSource::new([segment(5, 600)]),
            PromptSource::new([segment(5, 88)]),
        );
        assert_eq!(text(&long).split_ascii_whitespace().count(), 600);
        assert!(text(&long).starts_with(&text(&short)));
        assert_ne!(text(&short), text(&PromptSource::new([segment(6, 88)])));
    }

    #[test]
    fn golden_text() {
        assert_eq!(text(&PromptSource::new([segment(1, 6)])), GOLDEN);
    }
    const GOLDEN: &str = " play story wood move move sure";

    #[test]
    fn an_answer_is_repeated_as_it_was() {
        let request = RequestId(9);
        let answer = Segment {
            content: Content::Answer(request),
            tokens: 3,
            role: Role::Assistant,
        };
        let mut out = String::new();
        let known = |r| (r == request).then_some(" one two three");
        answer.write_text(&Vocabulary::english(), &known, &mut out);
        assert_eq!(out, " one two three");
    }

    #[test]
    fn whole_blocks_of_an_id_hash_as_the_design_says() {
        let prompt = PromptSource::new([segment(10, 512), segment(11, 40)]);
        let blocks = prompt.to_blocks(16, BlockHash(3), 0).unwrap();
        let mut parent = BlockHash(3);
        let mut expected = Vec::new();
        for (id, count) in [(10, 32), (11, 2)] {
            for j in 0..count {
                parent = parent.child_of_id(id, j);
                expected.push(parent);
            }
        }
        assert_eq!(blocks.blocks(), expected);
        assert_eq!(blocks.len(), 552);
    }

    #[test]
    fn empty_prompts_and_blocks_are_refused() {
        let empty = PromptSource::new([segment(1, 0)]);
        assert_eq!(
            empty.to_blocks(16, BlockHash(0), 0),
            Err(PromptError::Empty)
        );
        let one = PromptSource::new([segment(1, 1)]);
        assert_eq!(
            one.to_blocks(0, BlockHash(0), 0),
            Err(PromptError::BlockSize)
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        /// Hashed prompts share as many leading blocks as their token sequences do.
        #[test]
        fn blocks_agree_with_tokens(
            shared in prop::collection::vec((0u64..1_000, 1u32..50), 0..4),
            a in (1_000u64..2_000, 1u32..60),
            b in (2_000u64..3_000, 1u32..60),
            block_size in 1u32..20,
        ) {
            let build = |last: (u64, u32)| {
                PromptSource::new(shared.iter().chain([&last]).map(|&(id, n)| segment(id, n)))
            };
            let (a, b) = (build(a), build(b));
            let tokens = |p: &PromptSource| {
                let mut out = Vec::new();
                for s in p.segments() {
                    // A wide range, so that different texts differ at their first token.
                    write_token_ids(s.name(), s.tokens, 0..u32::MAX, &mut out);
                }
                out
            };
            let (ta, tb) = (tokens(&a), tokens(&b));
            let common = ta.iter().zip(&tb).take_while(|(x, y)| x == y).count() as u32;
            let (ha, hb) = (
                a.to_blocks(block_size, BlockHash(1), 0).unwrap(),
                b.to_blocks(block_size, BlockHash(1), 0).unwrap(),
            );
            let shared_blocks =
                ha.blocks().iter().zip(hb.blocks()).take_while(|(x, y)| x == y).count() as u32;
            prop_assert_eq!(shared_blocks, common / block_size);
            // No two blocks of one prompt are the same, since each hashes its parent.
            prop_assert_eq!(ha.blocks().iter().collect::<HashSet<_>>().len(), ha.blocks().len());
        }
    }
}
