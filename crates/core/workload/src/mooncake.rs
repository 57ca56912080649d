//! Writes Mooncake's trace format: one request per line, its prompt as ids of blocks.

use std::collections::HashMap;
use std::io::{self, Write};

use serde::Serialize;
use slipstream_base::width;
use slipstream_base::{BlockHash, SimTime};

use crate::form::UNIT;
use crate::prompt::{Content, PromptSource, Role, Segment, answer_name};
use crate::request::Request;
use crate::source::Source;

#[derive(Serialize)]
struct Line<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    unit: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timestamp: Option<f64>,
    input_length: u32,
    output_length: u32,
    hash_ids: &'a [u32],
    #[serde(skip_serializing_if = "Option::is_none")]
    session_id: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delay: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<i32>,
}

/// Writes requests as lines with `hash_ids`: equal ids are equal blocks after equal prompts. Memory
/// grows with the distinct blocks.
#[derive(Debug)]
pub struct MooncakeWriter {
    tokens_per_id: u32,
    ids: HashMap<BlockHash, u32>,
    /// Whether every line names its session: if any has more than one turn.
    sessions: bool,
    /// No line is written yet.
    is_first: bool,
}

impl MooncakeWriter {
    /// One id per `tokens_per_id` tokens, above 0. `sessions`: lines name their session, so that
    /// later turns can follow from answers.
    pub fn new(tokens_per_id: u32, sessions: bool) -> MooncakeWriter {
        MooncakeWriter {
            tokens_per_id: tokens_per_id.max(1),
            ids: HashMap::new(),
            sessions,
            is_first: true,
        }
    }

    /// Writes the session that begins with `first`, one line per turn. `source` generated it;
    /// answers count at full length. `scale` is the time scale that due times were divided by.
    ///
    /// Returns the number of turns.
    ///
    /// # Errors
    /// If `out` fails.
    pub fn write_session(
        &mut self,
        out: &mut impl Write,
        source: &Source,
        first: Request,
        scale: f64,
    ) -> io::Result<u64> {
        let ms = |at: SimTime| at.as_secs_f64() * 1e3 * scale;
        let (mut turns, mut next) = (0, Some(first));
        let mut delay = None;
        while let Some(request) = next {
            let ids = self.ids_of(&request);
            let line = Line {
                // Times of high rates have fractions of a millisecond, by which other files are doubted.
                unit: std::mem::take(&mut self.is_first).then_some(UNIT),
                timestamp: delay.is_none().then(|| ms(request.due)),
                input_length: request.prompt.tokens(),
                output_length: request.output_len,
                hash_ids: &ids,
                session_id: self.sessions.then_some(request.session),
                delay,
                priority: (request.priority != 0).then_some(request.priority),
            };
            serde_json::to_writer(&mut *out, &line)?;
            out.write_all(b"\n")?;
            turns += 1;
            next = source.follow_up(&request, request.output_len, SimTime::ZERO);
            delay = next.as_ref().map(|next| ms(next.due));
        }
        Ok(turns)
    }

    fn ids_of(&mut self, request: &Request) -> Vec<u32> {
        let size = self.tokens_per_id;
        // The last block is filled up with a unique text, so that two prompts that are equal up to
        // their end have equal ids.
        let rest = (size - request.prompt.tokens() % size) % size;
        let filler = Segment {
            content: Content::Text(u64::MAX),
            tokens: rest,
            role: Role::User,
        };
        let segments = request.prompt.segments().iter().copied();
        let filled = PromptSource::new(segments.chain([filler]));
        let prompt = filled
            .to_blocks(size, BlockHash::default(), answer_name(request.id()))
            .expect("a request's prompt is not empty, nor is the block size 0");
        prompt
            .blocks()
            .iter()
            .map(|block| {
                let fresh = width::to_u32(self.ids.len());
                *self.ids.entry(*block).or_insert(fresh)
            })
            .collect()
    }
}
