//! A device and control over it.

use aquifer_device::Result;
use aquifer_tests::prelude::*;

pub(super) const MIB: u64 = 1 << 20;
/// Longer than any work in these tests.
pub(super) const LONG: Duration = Duration::from_secs(1);

pub(super) struct Bench {
    pub(super) subject: Subject,
    pub(super) device: Device,
    /// Memory that all streams fill.
    pub(super) ptr: DevicePtr,
}

impl Bench {
    pub(super) fn new() -> Bench {
        Bench::seeded(1)
    }

    pub(super) fn seeded(seed: u64) -> Bench {
        let subject = Subject::open(&SimConfig::new(1 << 30).seed(seed));
        let device = subject.device();
        let ptr = device.alloc(MIB).unwrap();
        Bench { subject, device, ptr }
    }

    pub(super) fn stream(&self) -> Stream {
        self.device.stream().unwrap()
    }

    /// Writes the shared memory on a stream.
    pub(super) fn fill(&self, stream: &Stream) {
        stream.fill(self.ptr, 1, MIB).unwrap();
    }

    /// As [`Bench::new`], with streams.
    pub(super) fn with_streams<const N: usize>() -> (Bench, [Stream; N]) {
        let bench = Bench::new();
        let streams = [(); N].map(|()| bench.stream());
        (bench, streams)
    }

    /// Enqueues a write of the shared memory that stays pending until time is made to pass.
    pub(super) fn busy(&self, stream: &Stream) {
        self.stall(stream);
        self.fill(stream);
    }

    /// As [`Bench::busy`]; returns the tick after the write.
    pub(super) fn long_work(&self, stream: &Stream) -> Tick {
        self.busy(stream);
        stream.tick()
    }

    /// Writes the shared memory on a stream and panics if that races with other writes of it.
    pub(super) fn fill_without_race(&self, stream: &Stream) {
        self.fill(stream);
        self.assert_no_race();
    }

    /// Keeps the work enqueued next on a stream pending until time is made to pass.
    pub(super) fn stall(&self, stream: &Stream) {
        self.subject.stall(stream, LONG).unwrap();
    }

    pub(super) fn pass(&self) {
        self.subject.advance(LONG * 10);
    }

    /// Events recorded and waits inserted so far.
    pub(super) fn cost(&self) -> (u64, u64) {
        let counts = self.device.timeline_counts();
        (counts.events_recorded, counts.waits_inserted)
    }

    pub(super) fn calls(&self, operation: Operation) -> u64 {
        self.device.driver_calls().of(operation)
    }

    /// Lets the next call of `operation` fail once.
    pub(super) fn fail_next(&self, operation: Operation) {
        self.subject.inject(Fault::Nth { operation: Some(operation), nth: 1, code: Code(999) });
    }

    /// Drops a stream that the driver reports as destroyed by other code, so that no last event is
    /// recorded.
    pub(super) fn drop_destroyed(&self, stream: Stream) {
        self.subject.inject(Fault::Nth { operation: Some(Operation::Record), nth: 1, code: Code::INVALID_HANDLE });
        drop(stream);
    }

    pub(super) fn assert_no_race(&self) {
        self.subject.assert_no_violation();
    }
}

/// How many cases a test runs that runs `n` in virtual time.
pub(super) fn cases(n: u64) -> u32 {
    u32::try_from(Subject::share(n)).unwrap_or(u32::MAX)
}

pub(super) fn kind<T: std::fmt::Debug>(result: Result<T>) -> ErrorKind {
    result.unwrap_err().kind
}
