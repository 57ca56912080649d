//! Whether an engine thread's steps are so few and short that a shard's thread may run them.
//!
//! Decided by counts and not by measured times, which a busy host blurs: a step of 1,024 tokens takes some 100 µs, and
//! eight rounds in 8 ms or more leave the shard nine tenths of its time.

/// Tokens of a round at most.
const TOKENS_MAX: u64 = 1024;
/// Rounds that are looked at together.
const ROUNDS: u32 = 8;
/// Time that they take at least, ns.
const ROUNDS_NS: u64 = 8_000_000;

/// See the module's text.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Calm {
    is_calm: bool,
    /// Tokens of the present round.
    tokens: u64,
    rounds: u32,
    /// When the first of them began; 0 before.
    since_ns: u64,
}

impl Calm {
    #[inline]
    pub(crate) fn is_calm(&self) -> bool {
        self.is_calm
    }

    /// A pass of the present round computed `tokens`.
    #[inline]
    pub(crate) fn on_pass(&mut self, tokens: u64) {
        self.tokens += tokens;
    }

    /// A round with passes began at `now_ns` and is over.
    #[inline]
    pub(crate) fn on_round(&mut self, now_ns: u64) {
        if std::mem::take(&mut self.tokens) > TOKENS_MAX {
            *self = Calm::default();
            return;
        }
        if self.rounds == 0 {
            self.since_ns = now_ns;
        }
        self.rounds += 1;
        if self.rounds > ROUNDS {
            self.is_calm = now_ns.saturating_sub(self.since_ns) >= ROUNDS_NS;
            self.rounds = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(calm: &mut Calm, rounds: u32, gap_ns: u64, tokens: u64, now_ns: &mut u64) -> bool {
        for _ in 0..rounds {
            *now_ns += gap_ns;
            calm.on_pass(tokens);
            calm.on_round(*now_ns);
        }
        calm.is_calm()
    }

    #[test]
    fn few_and_short_steps_are_calm() {
        let (mut calm, mut now) = (Calm::default(), 1);
        assert!(
            !run(&mut calm, 8, 12_000_000, 64, &mut now),
            "too early to say"
        );
        assert!(run(&mut calm, 1, 12_000_000, 64, &mut now));
        assert!(run(&mut calm, 100, 12_000_000, 1024, &mut now));
        assert!(
            !run(&mut calm, 1, 12_000_000, 1025, &mut now),
            "a long step"
        );
        assert!(!run(&mut calm, 8, 12_000_000, 64, &mut now));
        assert!(run(&mut calm, 1, 12_000_000, 64, &mut now));
        assert!(!run(&mut calm, 9, 100_000, 1, &mut now), "ten steps per ms");
    }
}
