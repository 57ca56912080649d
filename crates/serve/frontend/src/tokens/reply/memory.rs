//! The memory that an answer is charged for.

use crate::door::budget::Charge;
use crate::openai::ApiError;

/// Memory of an answer.
pub(super) struct AnswerMemory {
    /// What it takes now, bytes.
    bytes: u64,
    /// Fixed part, bytes: without tokens that wait.
    base_bytes: u64,
    /// `None`: it is not charged.
    charge: Option<Charge>,
}

impl AnswerMemory {
    pub(super) fn new(charge: Option<Charge>) -> AnswerMemory {
        let bytes = charge.as_ref().map_or(0, Charge::bytes);
        AnswerMemory {
            bytes,
            base_bytes: bytes,
            charge,
        }
    }

    /// Charges `bytes` more.
    ///
    /// # Errors
    /// There is no memory for them.
    #[inline]
    pub(super) fn grow(&mut self, bytes: u64) -> Result<(), ApiError> {
        self.bytes += bytes;
        match &mut self.charge {
            Some(charge) => charge.grow_to(self.bytes),
            None => Ok(()),
        }
    }

    /// Whether more than the fixed part is charged.
    pub(super) fn has_grown(&self) -> bool {
        self.bytes > self.base_bytes
    }

    /// No tokens wait any more.
    pub(super) fn shrink_to_base(&mut self) {
        self.bytes = self.base_bytes;
        self.shrink_charge_to(self.base_bytes);
    }

    /// What is left of an answer that ended takes at most `bytes`.
    pub(super) fn shrink_charge_to(&mut self, bytes: u64) {
        if let Some(charge) = &mut self.charge {
            charge.shrink_to(bytes);
        }
    }
}
