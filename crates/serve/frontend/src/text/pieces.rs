//! Tokens of short runs of letters by hash: one look-up instead of a step per byte.

use slipstream_base::TokenId;
use slipstream_base::width::{high_u64, low_u64, to_usize};

/// Bytes that a look-up sees.
pub(super) const WINDOW: usize = 16;

/// Maps runs of ASCII letters, with or without a space in front, and single spaces to their tokens.
pub(super) struct Pieces {
    /// A power of two, at most half of them taken; a run is in the first free one from its hash on.
    slots: Box<[Slot]>,
    shift: u32,
}

#[derive(Clone, Copy)]
struct Slot {
    /// The bytes of the run, the first lowest; zeros behind them.
    low: u64,
    high: u64,
    token: TokenId,
}

const NONE: TokenId = TokenId::MAX;
const FREE: Slot = Slot {
    low: 0,
    high: 0,
    token: NONE,
};

/// `byte` in each byte.
const fn each(byte: u8) -> u128 {
    u128::from_ne_bytes([byte; WINDOW])
}

impl Pieces {
    /// Takes those of `entries` that a look-up can see.
    pub(super) fn new<'a>(entries: impl Iterator<Item = (&'a [u8], TokenId)>) -> Pieces {
        let mut found = Vec::new();
        for (bytes, token) in entries {
            let mut window = [0; WINDOW];
            if bytes.len() < WINDOW {
                window[..bytes.len()].copy_from_slice(bytes);
                if run_of(window) == bytes.len() {
                    found.push((halves(u128::from_le_bytes(window)), token));
                }
            }
        }
        let bits = (2 * found.len()).next_power_of_two().ilog2().max(1);
        let mut pieces = Pieces {
            slots: vec![FREE; 1 << bits].into(),
            shift: u64::BITS - bits,
        };
        for ((low, high), token) in found {
            let at = pieces.place(low, high);
            pieces.slots[at] = Slot { low, high, token };
        }
        pieces
    }

    /// The token of the run that `window` begins with, and the run's bytes. None if it is not one token,
    /// or if the run may not end within `window`.
    #[inline]
    pub(super) fn find(&self, window: [u8; WINDOW]) -> Option<(TokenId, usize)> {
        let run = run_of(window);
        if run == WINDOW {
            return None;
        }
        let (low, high) = halves(u128::from_le_bytes(window) & ((1 << (8 * run)) - 1));
        let token = self.slots[self.place(low, high)].token;
        (token != NONE).then_some((token, run))
    }

    /// The slot of a run, or the free one where it would be.
    #[inline]
    fn place(&self, low: u64, high: u64) -> usize {
        let mixed = (low ^ high.rotate_left(23)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut at = to_usize(mixed >> self.shift);
        loop {
            let slot = self.slots[at];
            if slot.token == NONE || (slot.low == low && slot.high == high) {
                return at;
            }
            at = (at + 1) & (self.slots.len() - 1);
        }
    }
}

/// Bytes of the letters that `window` begins with, a space in front included; [`WINDOW`] if all are.
#[inline]
fn run_of(window: [u8; WINDOW]) -> usize {
    let bytes = u128::from_le_bytes(window);
    // In each byte, without carries: bit 7 is set from 'a' on, or behind 'z'.
    let lower = (bytes | each(0x20)) & each(0x7f);
    let from_a = lower + each(0x80 - b'a');
    let behind_z = lower + each(0x7f - b'z');
    let mut others = !(from_a & !behind_z & !bytes) & each(0x80);
    if window[0] == b' ' {
        others &= !0x80;
    }
    others.trailing_zeros() as usize / 8
}

/// Both halves of `run`, the first bytes first.
#[inline]
fn halves(run: u128) -> (u64, u64) {
    (low_u64(run), high_u64(run))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_run_is_a_space_and_letters(text in prop::collection::vec(
            prop_oneof![4 => prop::sample::select(&b"azAZ mM"[..]), 1 => any::<u8>()], WINDOW)) {
            let window: [u8; WINDOW] = text.clone().try_into().unwrap();
            let space = usize::from(text[0] == b' ');
            let letters = text[space..].iter().take_while(|b| b.is_ascii_alphabetic()).count();
            prop_assert_eq!(run_of(window), space + letters);
        }

        #[test]
        fn finds_what_was_put_in(
            entries in prop::collection::btree_set("[ ]?[a-cA-B]{0,15}|[ a-c.]{1,4}", 1..60),
            text in "[ ]?[a-cA-B.]{0,4}.{0,16}",
        ) {
            let entries: Vec<String> = entries.into_iter().filter(|e| !e.is_empty()).collect();
            let pieces = Pieces::new(entries.iter().map(String::as_bytes).zip(0..));
            let mut window = [0; WINDOW];
            for (to, from) in window.iter_mut().zip(text.bytes()) {
                *to = from;
            }
            let run = run_of(window);
            let expected = entries
                .iter()
                .position(|e| run < WINDOW && run > 0 && e.as_bytes() == &window[..run])
                .map(|token| (token as u32, run));
            prop_assert_eq!(pieces.find(window), expected);
        }
    }
}
