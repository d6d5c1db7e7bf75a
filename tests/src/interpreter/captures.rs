//! Captures: of memory that a private pool keeps for their graphs, ended, dropped or left to
//! others.

use aquifer_allocator::AllocError;

use super::Interpreter;
use crate::op::CaptureEnd;

impl Interpreter {
    pub(super) fn capture(&self, stream: usize, pool: usize, bytes: u64, end: CaptureEnd) {
        let stream = self.stream(stream).clone();
        let Some(pool) = self.pools.get(pool % self.pools.len().max(1)) else { return };
        if stream.raw().is_legacy() {
            return;
        }
        let Some(capture) = self.allows(stream.begin_capture()) else { return };
        if let Some(route) = self.allows(self.allocator.capture(&stream, pool)) {
            match self.allocator.alloc_bytes(bytes, &stream) {
                Ok(scratch) => self.judge(stream.fill(scratch.ptr(), 1, bytes)),
                // Captures get no memory that would have to be waited for.
                Err(AllocError::OutOfMemory(_) | AllocError::TooLarge { .. }) => {}
                Err(error) => self.judge::<(), _>(Err(error)),
            }
            drop(route);
        }
        match end {
            CaptureEnd::Drop => drop(capture),
            CaptureEnd::DropOnThread => {
                std::thread::spawn(move || drop(capture)).join().unwrap_or_else(|_| panic!("the thread panicked"));
            }
            CaptureEnd::Launch(on) => {
                if let Some(graph) = self.allows(capture.end()) {
                    self.judge(graph.launch(self.stream(on)));
                }
            }
        }
    }
}
