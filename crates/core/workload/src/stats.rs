//! Statistics of a stream of requests, without an engine.

use std::collections::HashMap;

use slipstream_base::width;
use slipstream_base::{BlockHash, SimTime};

use crate::prompt::answer_name;
use crate::request::Request;

/// Statistics of a stream of requests, added one by one. Memory grows with the distinct blocks.
#[derive(Debug)]
pub struct Stats {
    block_size: u32,
    window_ns: u64,
    /// When each block was last requested.
    seen: HashMap<BlockHash, SimTime>,
    /// Prompt and answer lengths, tokens.
    lengths: [Vec<u32>; 2],
    hit_tokens: u64,
    /// Windows with requests, by number.
    windows: Vec<(u64, Window)>,
    last: SimTime,
}

/// A time window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// Requests due in it.
    pub requests: u64,
    /// Their prompts, tokens.
    pub input_tokens: u64,
    /// Of those, tokens in blocks that an earlier request had (in an endless cache).
    pub hit_tokens: u64,
    /// Distinct blocks requested in it: the working set.
    pub blocks: u64,
}

/// Mean and quantiles of values.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Lengths {
    /// Arithmetic mean.
    pub mean: f64,
    /// Smallest, p50, p90, p99 and largest.
    pub at: [u32; 5],
}

impl Stats {
    /// Counts in blocks of `block_size` tokens and windows of `window_ns`, both above 0.
    pub fn new(block_size: u32, window_ns: u64) -> Stats {
        Stats {
            block_size: block_size.max(1),
            window_ns: window_ns.max(1),
            seen: HashMap::new(),
            lengths: [Vec::new(), Vec::new()],
            hit_tokens: 0,
            windows: Vec::new(),
            last: SimTime::ZERO,
        }
    }

    /// Counts a request. Requests must be in the order of their due times.
    pub fn add(&mut self, request: &Request) {
        let number = request.due.0 / self.window_ns;
        if self.windows.last().is_none_or(|&(last, _)| last < number) {
            self.windows.push((number, Window::default()));
        }
        let (_, window) = self.windows.last_mut().expect("one was pushed");
        let begins = SimTime(number * self.window_ns);
        let root = BlockHash::default();
        let id = answer_name(request.id());
        let mut hits = 0;
        // A prompt without tokens has no blocks either.
        if let Ok(prompt) = request.prompt.to_blocks(self.block_size, root, id) {
            let mut leading = true;
            for &block in prompt.blocks() {
                let before = self.seen.insert(block, request.due);
                leading &= before.is_some();
                hits += u64::from(leading);
                window.blocks += u64::from(before.is_none_or(|at| at < begins));
            }
        }
        let hit_tokens = hits * u64::from(self.block_size);
        let tokens = request.prompt.tokens();
        window.requests += 1;
        window.input_tokens += u64::from(tokens);
        window.hit_tokens += hit_tokens;
        self.hit_tokens += hit_tokens;
        self.lengths[0].push(tokens);
        self.lengths[1].push(request.output_len);
        self.last = self.last.max(request.due);
    }

    /// Number of requests.
    pub fn requests(&self) -> u64 {
        self.lengths[0].len() as u64
    }

    /// Due time of the last request.
    pub fn duration(&self) -> SimTime {
        self.last
    }

    /// Total of prompt tokens and answer tokens.
    pub fn tokens(&self) -> [u64; 2] {
        self.lengths
            .each_ref()
            .map(|l| l.iter().map(|&n| u64::from(n)).sum())
    }

    /// Prompt tokens in leading blocks that an earlier prompt had: the hits of an endless shared
    /// cache.
    pub fn ideal_hit_tokens(&self) -> u64 {
        self.hit_tokens
    }

    /// Number of distinct blocks.
    pub fn blocks(&self) -> u64 {
        self.seen.len() as u64
    }

    /// Windows with due requests, each with its number: window *n* begins after *n* times its
    /// length.
    pub fn windows(&self) -> &[(u64, Window)] {
        &self.windows
    }

    /// Lengths of prompts and answers.
    pub fn lengths(&mut self) -> [Lengths; 2] {
        self.lengths.each_mut().map(|all| {
            all.sort_unstable();
            let Some(last) = all.len().checked_sub(1) else {
                return Lengths::default();
            };
            let sum: u64 = all.iter().map(|&n| u64::from(n)).sum();
            Lengths {
                mean: sum as f64 / all.len() as f64,
                // The smallest length that this share of all do not exceed.
                at: [0.0, 0.5, 0.9, 0.99, 1.0].map(|share| {
                    let rank = width::to_usize(width::floor_u64((share * all.len() as f64).ceil()));
                    all[rank.saturating_sub(1).min(last)]
                }),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::{Content, PromptSource, Role, Segment};

    fn request(session: u64, due_s: u64, texts: &[u64]) -> Request {
        let segment = |&id: &u64| Segment {
            content: Content::Text(id),
            tokens: 512,
            role: Role::User,
        };
        Request {
            session,
            turn: 0,
            turns: 1,
            due: SimTime(due_s * 1_000_000_000),
            prompt: PromptSource::new(texts.iter().map(segment)),
            output_len: session as u32 + 1,
            ignore_eos: true,
            priority: 0,
            adapter: 0,
            images: crate::Images::default(),
            model: 0,
            class: 0,
        }
    }

    #[test]
    fn hits_are_leading_blocks_and_working_sets_are_per_window() {
        let mut stats = Stats::new(256, 60_000_000_000);
        stats.add(&request(0, 0, &[1, 2]));
        stats.add(&request(1, 10, &[1, 3]));
        stats.add(&request(2, 70, &[9, 3])); // 3 is not leading here, and follows something else
        stats.add(&request(3, 80, &[1, 2]));
        assert_eq!(stats.ideal_hit_tokens(), 512 + 1024);
        assert_eq!(stats.blocks(), 10);
        assert_eq!(stats.tokens(), [4 * 1024, 1 + 2 + 3 + 4]);
        let blocks: Vec<u64> = stats.windows().iter().map(|(_, w)| w.blocks).collect();
        assert_eq!(blocks, [6, 8]);
        let requests: Vec<u64> = stats.windows().iter().map(|(_, w)| w.requests).collect();
        assert_eq!(requests, [2, 2]);
        // Idle time takes no memory.
        stats.add(&request(4, 4_000_000_000, &[7]));
        assert_eq!(stats.windows().len(), 3);
        assert_eq!(stats.windows()[2].0, 4_000_000_000 / 60);
        let [input, output] = stats.lengths();
        assert_eq!(
            (input.mean, input.at),
            (921.6, [512, 1024, 1024, 1024, 1024])
        );
        assert_eq!((output.mean, output.at), (3.0, [1, 3, 5, 5, 5]));
    }

    #[test]
    fn nothing_has_no_lengths() {
        let mut stats = Stats::new(16, 1);
        assert_eq!(stats.lengths(), [Lengths::default(); 2]);
        assert_eq!((stats.requests(), stats.blocks()), (0, 0));
    }
}
