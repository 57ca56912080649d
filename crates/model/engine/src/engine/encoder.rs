//! Encoder inputs of multimodal prompts: when they are computed, and which outputs are kept.
//!
//! Sources: vLLM 0.33, `Scheduler._try_schedule_encoder_inputs` and `_free_encoder_inputs`, and `EncoderCacheManager` in
//! `vllm/v1/core/encoder_cache_manager.py`.

use std::collections::BTreeMap;

use slipstream_base::EncoderInput;
use slipstream_base::width::{round_u64, to_u32};
use slipstream_config::cluster::EncoderConfig;

use super::Engine;
use super::schedule::Plan;
use super::sequence::RunningSequence;

/// The outputs that an engine's encoder has computed, and who needs them.
pub(super) struct Encoder {
    /// Tokens that a pass may compute.
    pub(super) budget: u32,
    /// An input is not divided between passes.
    whole: bool,
    input_ns: f64,
    token_ns: f64,
    /// Room for outputs, tokens.
    room: u32,
    /// Of it, neither taken by an output that a sequence needs, nor by any.
    free: u32,
    /// The same, with outputs that no sequence needs any more.
    freeable: u32,
    /// Outputs by the input's id.
    outputs: BTreeMap<u64, Output>,
    /// Ids of outputs that no sequence needs, in the order in which they were left.
    left: BTreeMap<u64, u64>,
    /// Outputs left so far.
    leavings: u64,
    /// Of each sequence that needs outputs, by its slot: the indices of those inputs, in order.
    needs: BTreeMap<u32, Vec<u32>>,
    /// Of the sequence that is being scheduled: indices of the inputs that its chunk needs computed, and of further ones of
    /// equal content.
    compute: Vec<u32>,
    again: Vec<u32>,
    /// Inputs and tokens computed so far.
    pub(super) computed: (u64, u64),
}

struct Output {
    tokens: u32,
    /// Sequences that need it.
    sequences: u32,
    /// If none does: its place in `left`.
    place: u64,
}

/// Encoder inputs that a pass computes for a sequence.
pub(super) struct Encoded {
    slot: u32,
    inputs: u32,
    tokens: u32,
}

impl Encoder {
    pub(super) fn new(config: &EncoderConfig) -> Encoder {
        Encoder {
            budget: config.budget_tokens,
            whole: config.whole_inputs,
            input_ns: config.input_ns,
            token_ns: config.token_ns,
            room: config.cache_tokens,
            free: config.cache_tokens,
            freeable: config.cache_tokens,
            outputs: BTreeMap::new(),
            left: BTreeMap::new(),
            leavings: 0,
            needs: BTreeMap::new(),
            compute: Vec::new(),
            again: Vec::new(),
            computed: (0, 0),
        }
    }

    /// Forgets all outputs: the worker's process has ended.
    pub(super) fn clear(&mut self) {
        (self.free, self.freeable) = (self.room, self.room);
        self.outputs.clear();
        self.left.clear();
        self.needs.clear();
    }

    /// Most tokens of an input that can ever be computed.
    pub(super) fn input_max(&self) -> u32 {
        self.budget.min(self.room)
    }

    /// Whether an input is not divided between passes.
    pub(super) fn takes_whole(&self) -> bool {
        self.whole
    }

    /// Whether a sequence needs an output.
    pub(super) fn is_needed(&self) -> bool {
        !self.needs.is_empty()
    }

    /// Time of the inputs that a pass computes, ns.
    fn ns(&mut self, encoded: &[Encoded]) -> u64 {
        let inputs: u64 = encoded.iter().map(|e| u64::from(e.inputs)).sum();
        let tokens: u64 = encoded.iter().map(|e| u64::from(e.tokens)).sum();
        self.computed.0 += inputs;
        self.computed.1 += tokens;
        round_u64(self.input_ns * inputs as f64 + self.token_ns * tokens as f64)
    }

    /// The sequence `slot` needs the output of its input `index`, which is there.
    fn need(&mut self, slot: u32, inputs: &[EncoderInput], index: u32) {
        let id = inputs[index as usize].id;
        let needs = self.needs.entry(slot).or_default();
        let known = needs.iter().any(|&i| inputs[i as usize].id == id);
        if let Err(at) = needs.binary_search(&index) {
            needs.insert(at, index);
        }
        if known {
            return;
        }
        if let Some(output) = self.outputs.get_mut(&id) {
            if output.sequences == 0 {
                self.left.remove(&output.place);
                self.freeable -= output.tokens;
            }
            output.sequences += 1;
        }
    }

    /// The sequence `slot` needs the output of its input `index` no more.
    fn leave(&mut self, slot: u32, inputs: &[EncoderInput], index: u32) {
        let id = inputs[index as usize].id;
        let Some(needs) = self.needs.get_mut(&slot) else {
            return;
        };
        needs.retain(|&i| i != index);
        let still = needs.iter().any(|&i| inputs[i as usize].id == id);
        if needs.is_empty() {
            self.needs.remove(&slot);
        }
        if still {
            return;
        }
        if let Some(output) = self.outputs.get_mut(&id) {
            output.sequences -= 1;
            if output.sequences == 0 {
                output.place = self.leavings;
                self.left.insert(self.leavings, id);
                self.leavings += 1;
                self.freeable += output.tokens;
            }
        }
    }

    /// The sequence `slot` needs no output any more.
    pub(super) fn leave_all(&mut self, slot: u32, inputs: &[EncoderInput]) {
        let Some(needs) = self.needs.get(&slot) else {
            return;
        };
        for index in needs.clone() {
            self.leave(slot, inputs, index);
        }
    }

    /// The sequence `slot` has computed its first `tokens`: it needs no output of inputs before.
    fn leave_passed(&mut self, slot: u32, inputs: &[EncoderInput], tokens: u32) {
        let Some(needs) = self.needs.get(&slot) else {
            return;
        };
        for index in needs.clone() {
            if inputs[index as usize].end() <= tokens {
                self.leave(slot, inputs, index);
            }
        }
    }

    /// Whether there is room for `tokens` of output besides `planned` ones. Outputs that no sequence needs make room.
    fn makes_room(&mut self, tokens: u32, planned: u32) -> bool {
        let tokens = tokens + planned;
        if tokens <= self.free {
            return true;
        }
        if tokens > self.freeable {
            return false;
        }
        while tokens > self.free
            && let Some((_, id)) = self.left.pop_first()
        {
            let output = self.outputs.remove(&id);
            self.free += output.map_or(0, |output| output.tokens);
        }
        true
    }

    /// How many of the `chunk` tokens behind `before` ones the pass that is being scheduled can compute for the sequence
    /// `slot`, given the outputs that they need. `budget` is that of the pass. The inputs to be computed are noted for
    /// [`compute`](Encoder::compute).
    pub(super) fn fit(
        &mut self,
        slot: u32,
        inputs: &[EncoderInput],
        before: u32,
        mut chunk: u32,
        mut budget: u32,
    ) -> u32 {
        self.compute.clear();
        self.again.clear();
        let mut planned = 0;
        let end = before + chunk;
        for (index, input) in (0u32..).zip(inputs) {
            if input.end() <= before {
                continue;
            }
            if input.offset >= end {
                break;
            }
            if self.whole && before <= input.offset && end < input.end() {
                chunk = input.offset - before;
                break;
            }
            let mut planned_ids = self.compute.iter().map(|&i| inputs[i as usize].id);
            if planned_ids.any(|id| id == input.id) {
                self.again.push(index);
                continue;
            }
            if self.outputs.contains_key(&input.id) {
                self.need(slot, inputs, index);
                continue;
            }
            if input.tokens > budget || !self.makes_room(input.tokens, planned) {
                // Blocks of its first tokens may be cached, and the output is missing still.
                chunk = input.offset.saturating_sub(before);
                break;
            }
            planned += input.tokens;
            budget -= input.tokens;
            self.compute.push(index);
        }
        chunk
    }

    /// Computes what [`fit`](Encoder::fit) noted.
    pub(super) fn compute(&mut self, slot: u32, inputs: &[EncoderInput], plan: &mut Plan) {
        let (compute, again) = (
            std::mem::take(&mut self.compute),
            std::mem::take(&mut self.again),
        );
        let mut tokens = 0;
        for &index in &compute {
            let input = inputs[index as usize];
            tokens += input.tokens;
            self.free -= input.tokens;
            let output = Output {
                tokens: input.tokens,
                sequences: 0,
                place: u64::MAX,
            };
            self.outputs.insert(input.id, output);
            self.need(slot, inputs, index);
        }
        for &index in &again {
            self.need(slot, inputs, index);
        }
        if !compute.is_empty() {
            plan.encoded.push(Encoded {
                slot,
                inputs: to_u32(compute.len()),
                tokens,
            });
            plan.encoder_budget -= tokens;
        }
        (self.compute, self.again) = (compute, again);
    }
}

impl Plan {
    /// Undoes the encoding for a sequence that is preempted: it is not computed, and its budget is free again.
    pub(super) fn take_back_inputs(&mut self, slot: u32) {
        if let Some(at) = self.encoded.iter().position(|e| e.slot == slot) {
            self.encoder_budget += self.encoded.remove(at).tokens;
        }
    }
}

impl Engine {
    /// How many of the `chunk` tokens behind `before` ones a pass can compute for a sequence, given its encoder inputs.
    pub(super) fn fit_inputs(&mut self, slot: u32, before: u32, chunk: u32, plan: &Plan) -> u32 {
        let Some(encoder) = &mut self.encoder else {
            return chunk;
        };
        let inputs = &self.sequences[slot].request.params.encoder_inputs;
        if inputs.is_empty() {
            return chunk;
        }
        encoder.fit(slot, inputs, before, chunk, plan.encoder_budget)
    }

    /// Computes the encoder inputs that [`fit_inputs`](Engine::fit_inputs) found for this sequence just before.
    /// `budget` is that of the pass at that time.
    pub(super) fn compute_inputs(&mut self, slot: u32, budget: u32, plan: &mut Plan) {
        let Some(encoder) = &mut self.encoder else {
            return;
        };
        let inputs = &self.sequences[slot].request.params.encoder_inputs;
        if !inputs.is_empty() {
            if !encoder.compute.is_empty() {
                // Budget that a sequence gave back since is lost, as in vLLM.
                plan.encoder_budget = budget;
            }
            encoder.compute(slot, inputs, plan);
        }
    }

    /// Whether a sequence has inputs for the encoder.
    pub(super) fn encodes(&self, slot: u32) -> bool {
        let params = &self.sequences[slot].request.params;
        self.encoder.is_some() && !params.encoder_inputs.is_empty()
    }

    /// Time of the encoder in a pass that was scheduled, ns.
    pub(super) fn encoder_ns(&mut self, plan: &Plan) -> u64 {
        let encoder = self.encoder.as_mut();
        encoder.map_or(0, |encoder| encoder.ns(&plan.encoded))
    }

    /// A sequence leaves the running queue or the engine.
    pub(super) fn leave_inputs(&mut self, slot: u32) {
        if let Some(encoder) = &mut self.encoder {
            encoder.leave_all(slot, &self.sequences[slot].request.params.encoder_inputs);
        }
    }

    /// A pass that had a part of the sequence has ended: outputs before its computed tokens are needed no more.
    ///
    /// Source: vLLM, `Scheduler._free_encoder_inputs`, which counts tokens of passes that are scheduled already, without
    /// those that wait for a token that is not known yet (`num_output_placeholders`).
    pub(super) fn leave_passed_inputs(&mut self, r: &RunningSequence) {
        let Some(encoder) = &mut self.encoder else {
            return;
        };
        let mut known = r.computed + r.scheduled;
        if self.limits.ahead {
            let gives = u32::from(r.computed >= r.len);
            let gives_next = r.scheduled > 0 && known >= r.len + gives;
            known -= gives + u32::from(gives_next);
        }
        let inputs = &self.sequences[r.slot].request.params.encoder_inputs;
        encoder.leave_passed(r.slot, inputs, known);
    }

    /// Encoder inputs computed so far, and their tokens.
    pub fn encoded(&self) -> (u64, u64) {
        self.encoder.as_ref().map_or((0, 0), |e| e.computed)
    }

    /// Room for encoder outputs that is free, and with outputs that no sequence needs any more. For tests.
    #[doc(hidden)]
    pub fn encoder_room(&self) -> (u32, u32) {
        let encoder = self.encoder.as_ref();
        encoder.map_or((0, 0), |e| (e.free, e.freeable))
    }
}
