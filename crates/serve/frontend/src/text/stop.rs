//! Stop strings in a text that grows.

use std::sync::Arc;

use slipstream_base::width::to_u32;

/// Finds stop strings in streamed text, and holds back what may yet become one.
///
/// The string that ends first counts; of several that end at one place, the longest. The outcome
/// does not depend on how the text is cut into pushes. A push costs time for each new byte and stop
/// string, whatever was held back: each string is followed by the automaton of Knuth, Morris and
/// Pratt (SIAM J. Comput. 6(2), 1977). Clones share the automata.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Box<[Stop]>,
    include: bool,
    /// Text not given out yet: it is the beginning of a stop string.
    held: String,
    hit: Option<StopHit>,
}

/// A stop string was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopHit {
    /// Its place in the list given to [`StopMatcher::new`].
    pub index: usize,
}

#[derive(Clone, Debug)]
struct Stop {
    text: Arc<[u8]>,
    /// `borders[k]`: longest proper border of `text[..k]`, that is, how many bytes stay matched when
    /// byte `k` does not match. Shape `[text.len()]`.
    borders: Arc<[u32]>,
    /// Bytes of `text` that the end of the pushed text matches; below `text.len()`.
    matched: usize,
}

impl Stop {
    fn new(text: &str) -> Stop {
        let text: Arc<[u8]> = text.as_bytes().into();
        let mut borders = vec![0u32; text.len()];
        let mut border = 0;
        for at in 1..text.len() {
            borders[at] = to_u32(border);
            while border > 0 && text[at] != text[border] {
                border = borders[border] as usize;
            }
            if text[at] == text[border] {
                border += 1;
            }
        }
        Stop {
            text,
            borders: borders.into(),
            matched: 0,
        }
    }

    /// Follows one more byte; true if it completes the string.
    #[inline]
    fn push(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.text[self.matched] != byte {
            self.matched = self.borders[self.matched] as usize;
        }
        if self.text[self.matched] == byte {
            self.matched += 1;
        }
        self.matched == self.text.len()
    }
}

impl StopMatcher {
    /// A matcher of `stops`; empty strings are left out (the request's parser refuses them). With
    /// `include`, the string that was found is given out too.
    pub fn new<S: AsRef<str>>(stops: &[S], include: bool) -> StopMatcher {
        StopMatcher {
            // Indices into the list must hold, so an empty string keeps its place and never matches.
            stops: stops.iter().map(|stop| Stop::new(stop.as_ref())).collect(),
            include,
            held: String::new(),
            hit: None,
        }
    }

    /// Follows `text`, and appends to `out` what can be given out now. After a hit, which it
    /// returns, nothing more is taken or given.
    pub fn push(&mut self, text: &str, out: &mut String) -> Option<StopHit> {
        if self.hit.is_some() {
            return self.hit;
        }
        let held = self.held.len();
        self.held.push_str(text);
        for (at, byte) in text.bytes().enumerate() {
            let mut longest: Option<(usize, usize)> = None;
            for (index, stop) in self.stops.iter_mut().enumerate() {
                if stop.text.is_empty() || !stop.push(byte) {
                    continue;
                }
                if longest.is_none_or(|(_, len)| stop.text.len() > len) {
                    longest = Some((index, stop.text.len()));
                }
            }
            if let Some((index, len)) = longest {
                let end = held + at + 1;
                let given = if self.include { end } else { end - len };
                out.push_str(&self.held[..given]);
                self.held.clear();
                self.hit = Some(StopHit { index });
                return self.hit;
            }
        }
        let keep = self.stops.iter().map(|s| s.matched).max().unwrap_or(0);
        // A string that begins inside a character cannot match: stops are whole characters, and so
        // `keep` ends at the start of one.
        let given = self.held.len() - keep;
        out.push_str(&self.held[..given]);
        self.held.drain(..given);
        None
    }

    /// Gives out `text` unchecked, and text held back before it: stop strings must not begin
    /// before it ends. For the first `min_tokens` tokens of an answer, as vLLM does.
    pub fn pass(&mut self, text: &str, out: &mut String) {
        self.finish(out);
        for stop in &mut self.stops {
            stop.matched = 0;
        }
        out.push_str(text);
    }

    /// The answer has ended: appends the text held back.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }

    /// The string that was found.
    pub fn hit(&self) -> Option<StopHit> {
        self.hit
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Pushes `pieces`; gives the text before the end, all text, and the hit.
    fn run(stops: &[&str], include: bool, pieces: &[&str]) -> (String, String, Option<usize>) {
        let mut matcher = StopMatcher::new(stops, include);
        let mut out = String::new();
        for piece in pieces {
            matcher.push(piece, &mut out);
        }
        let before = out.clone();
        matcher.finish(&mut out);
        (before, out, matcher.hit().map(|hit| hit.index))
    }

    #[test]
    fn a_beginning_is_held_back_until_it_cannot_become_a_stop() {
        assert_eq!(
            run(&["STOP"], false, &["go ST"]),
            ("go ".into(), "go ST".into(), None)
        );
        assert_eq!(
            run(&["STOP"], false, &["go ST", "AY"]),
            ("go STAY".into(), "go STAY".into(), None)
        );
        assert_eq!(
            run(&["STOP"], false, &["go ST", "OP and on"]),
            ("go ".into(), "go ".into(), Some(0))
        );
        assert_eq!(
            run(&["STOP"], true, &["go ST", "OP and on"]),
            ("go STOP".into(), "go STOP".into(), Some(0))
        );
    }

    #[test]
    fn the_string_that_ends_first_counts_and_the_longest_of_those() {
        assert_eq!(run(&["bcd", "ab"], false, &["xabcd"]).2, Some(1));
        assert_eq!(
            run(&["b", "ab", "xab"], false, &["1xab"]),
            ("1".into(), "1".into(), Some(2))
        );
    }

    #[test]
    fn what_min_tokens_lets_pass_is_not_searched() {
        let mut matcher = StopMatcher::new(&["ab"], false);
        let mut out = String::new();
        matcher.pass("ab a", &mut out);
        assert_eq!(matcher.push("b", &mut out), None);
        assert_eq!(matcher.push("ab", &mut out), Some(StopHit { index: 0 }));
        assert_eq!(out, "ab ab");
    }

    /// The same by definition: every end, every string.
    fn naive(stops: &[String], include: bool, text: &str) -> (String, Option<usize>) {
        for end in 1..=text.len() {
            let hit = stops
                .iter()
                .enumerate()
                .filter(|(_, stop)| text.as_bytes()[..end].ends_with(stop.as_bytes()))
                .max_by_key(|(index, stop)| (stop.len(), usize::MAX - index));
            if let Some((index, stop)) = hit {
                let given = if include { end } else { end - stop.len() };
                return (text[..given].into(), Some(index));
            }
        }
        (text.into(), None)
    }

    proptest! {
        #[test]
        fn agrees_with_a_search_by_definition(
            stops in prop::collection::vec("[abé]{1,5}", 1..4),
            pieces in prop::collection::vec("[abé]{0,4}", 0..12),
            include in any::<bool>(),
        ) {
            let stops_ref: Vec<&str> = stops.iter().map(String::as_str).collect();
            let pieces_ref: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let (before, all, hit) = run(&stops_ref, include, &pieces_ref);
            let text = pieces.concat();
            prop_assert_eq!((all, hit), naive(&stops, include, &text));
            // Nothing was given out too early, nothing held back for no reason.
            if hit.is_none() {
                let held = &text[before.len()..];
                let longest = (0..=text.len())
                    .filter(|&at| text.is_char_boundary(at))
                    .map(|at| &text[at..])
                    .find(|tail| stops.iter().any(|s| s.len() > tail.len() && s.starts_with(tail)))
                    .unwrap_or("");
                prop_assert_eq!(held, longest);
            }
        }
    }
}
