//! The modelled engine as a [`Backend`].

use slipstream_base::kv_event::StoredBlocks;
use slipstream_base::{EngineRequest, ForwardPassMetrics, KvDelta, RequestId, Role, SimTime};
use slipstream_engine::{Engine, PassOutput, Refusal, Reserved, Stats};
use slipstream_planes::RefusalReason;

use crate::backend::{Backend, Dead, Refused};

impl Backend for Engine {
    fn start(&mut self, now: SimTime, request: EngineRequest, role: Role) -> Result<(), Refused> {
        let added = match role {
            Role::Both => self.add(now, request),
            Role::Prefill => self.add_prompt(now, request),
            Role::Decode => self.add_answer(now, request),
        };
        added.map_err(|refusal| Refused {
            reason: match refusal {
                Refusal::Duplicate { .. } => RefusalReason::Duplicate,
                _ => RefusalReason::Invalid,
            },
            message: refusal.to_string(),
        })
    }

    fn kill(&mut self, id: RequestId) -> Option<u32> {
        let preemptions = self.preemptions_of(id);
        // A computed prompt is no sequence any more, but holds its blocks.
        (self.abort(id) || self.release_held(id)).then(|| preemptions.unwrap_or_default())
    }

    fn receive(&mut self, id: RequestId) -> bool {
        Engine::receive(self, id)
    }

    fn release(&mut self, id: RequestId) -> bool {
        self.release_held(id)
    }

    fn begin_step(
        &mut self,
        now: SimTime,
        reserved: &mut Vec<Reserved>,
    ) -> Result<Option<SimTime>, Dead> {
        let end = self.begin_pass(now);
        self.take_reserved(reserved);
        Ok(end)
    }

    fn finish_step(&mut self, out: &mut PassOutput) -> Result<(), Dead> {
        self.finish_pass(out);
        Ok(())
    }

    fn is_idle(&self) -> bool {
        Engine::is_idle(self)
    }

    fn stats(&self) -> Stats {
        Engine::stats(self)
    }

    fn max_len(&self) -> u32 {
        Engine::max_len(self)
    }

    fn heartbeat(&mut self, out: &mut ForwardPassMetrics) {
        Engine::heartbeat(self, out);
    }

    fn take_kv(&mut self, out: &mut KvDelta) -> bool {
        Engine::take_kv(self, out)
    }

    fn kv_snapshot(&self, out: &mut KvDelta) {
        Engine::kv_snapshot(self, out);
    }

    fn note_stored_blocks(&mut self, on: bool) {
        Engine::note_stored_blocks(self, on);
    }

    fn take_stored_blocks(&mut self, out: &mut StoredBlocks) {
        Engine::take_stored_blocks(self, out);
    }
}
