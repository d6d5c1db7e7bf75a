//! Random programs: an access that relies on `is_ordered_after` or `is_done` is never a race.

use aquifer_tests::prelude::*;
use proptest::prelude::*;

use super::common::{Bench, cases};

const CELL: u64 = 4096;
const CELLS: usize = 3;

/// One step. Numbers pick streams, cells and ticks of those that there are.
#[derive(Clone, Debug)]
enum Step {
    /// Writes a cell on a stream; orders the stream after the last writer before, if the last field
    /// is true.
    Write(usize, usize, bool),
    /// Writes a cell on a stream if its last writer's tick is done.
    WriteIfDone(usize, usize),
    Tick(usize),
    /// Makes a stream wait for a tick.
    WaitFor(usize, usize),
    /// Records an event on one stream and makes another wait for it.
    Event(usize, usize),
    Cover(usize),
    IsDone(usize),
    Synchronize(usize),
    /// Keeps a stream busy for that many µs.
    Stall(usize, u64),
    /// Lets that many µs pass.
    Pass(u64),
    /// Replaces a stream, by a blocking one if the last field is true.
    Replace(usize, bool),
    /// Makes the next wait fail if true, else the next record.
    Fail(bool),
}

fn step() -> impl Strategy<Value = Step> {
    let (stream, cell, tick) = (0..4_usize, 0..CELLS, any::<usize>());
    prop_oneof![
        8 => (stream.clone(), cell.clone(), any::<bool>())
            .prop_map(|(stream, cell, force)| Step::Write(stream, cell, force)),
        4 => (stream.clone(), cell).prop_map(|(stream, cell)| Step::WriteIfDone(stream, cell)),
        2 => stream.clone().prop_map(Step::Tick),
        4 => (stream.clone(), tick).prop_map(|(stream, tick)| Step::WaitFor(stream, tick)),
        2 => (stream.clone(), stream.clone()).prop_map(|(from, to)| Step::Event(from, to)),
        2 => tick.prop_map(Step::Cover),
        3 => tick.prop_map(Step::IsDone),
        1 => tick.prop_map(Step::Synchronize),
        3 => (stream.clone(), 1..200_u64).prop_map(|(stream, micros)| Step::Stall(stream, micros)),
        2 => (1..200_u64).prop_map(Step::Pass),
        1 => (stream, any::<bool>()).prop_map(|(stream, blocking)| Step::Replace(stream, blocking)),
        1 => any::<bool>().prop_map(Step::Fail),
    ]
}

struct Program {
    bench: Bench,
    /// The first is the legacy stream.
    streams: Vec<Stream>,
    ticks: Vec<Tick>,
    /// The tick after the last write of each cell.
    written: [Option<Tick>; CELLS],
    relied: u64,
}

impl Program {
    fn new(seed: u64) -> Program {
        let bench = Bench::seeded(seed);
        let mut streams = vec![bench.device.default_stream().clone()];
        streams.extend((0..3).map(|_| bench.stream()));
        Program { bench, streams, ticks: Vec::new(), written: [const { None }; CELLS], relied: 0 }
    }

    fn tick(&self, at: usize) -> Option<&Tick> {
        self.ticks.get(at.checked_rem(self.ticks.len())?)
    }

    fn write(&mut self, stream: usize, cell: usize) {
        let stream = &self.streams[stream];
        stream.fill(self.bench.ptr.offset(cell as u64 * CELL), 1, CELL).unwrap();
        self.relied += 1;
        let tick = stream.tick();
        self.ticks.push(tick.clone());
        self.written[cell] = Some(tick);
    }

    fn run(&mut self, step: &Step) {
        match *step {
            Step::Write(stream, cell, force) => {
                let on = &self.streams[stream];
                let ordered = match &self.written[cell] {
                    Some(last) if force => on.wait_for(last).is_ok(),
                    Some(last) => on.is_ordered_after(last),
                    None => true,
                };
                if ordered {
                    self.write(stream, cell);
                }
            }
            Step::WriteIfDone(stream, cell) => {
                if self.written[cell].as_ref().is_none_or(|last| last.is_done().unwrap()) {
                    self.write(stream, cell);
                }
            }
            Step::Tick(stream) => self.ticks.push(self.streams[stream].tick()),
            // These may fail where a fault is pending; nothing may be relied on then.
            Step::WaitFor(stream, tick) => drop(self.tick(tick).map(|tick| self.streams[stream].wait_for(tick))),
            Step::Event(from, to) => {
                let event = self.bench.device.create_event(false).unwrap();
                if event.record(&self.streams[from]).is_ok() {
                    drop(self.streams[to].wait_event(&event));
                }
            }
            Step::Cover(tick) => drop(self.tick(tick).map(Tick::cover)),
            Step::IsDone(tick) => drop(self.tick(tick).map(|tick| tick.is_done().unwrap())),
            Step::Synchronize(tick) => {
                if let Some(tick) = self.tick(tick)
                    && tick.synchronize().is_ok()
                {
                    assert!(tick.is_done().unwrap());
                }
            }
            Step::Stall(stream, micros) => {
                let time = Duration::from_micros(micros);
                self.bench.subject.stall(&self.streams[stream], time).unwrap();
            }
            Step::Pass(micros) => self.bench.subject.advance(Duration::from_micros(micros)),
            Step::Replace(0, _) => {}
            Step::Replace(stream, blocking) => {
                let flags = StreamFlags { non_blocking: !blocking, priority: 0 };
                // The new stream first, or the other way round so that the handle is reused.
                drop(std::mem::replace(&mut self.streams[stream], self.bench.device.default_stream().clone()));
                self.streams[stream] = self.bench.device.stream_with(flags).unwrap();
            }
            Step::Fail(wait) => {
                let operation = if wait { Operation::Wait } else { Operation::Record };
                self.bench.fail_next(operation);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(3000), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn accesses_ordered_by_ticks_never_race(seed in any::<u64>(), steps in prop::collection::vec(step(), 1..60)) {
        let mut program = Program::new(seed);
        for step in &steps {
            program.run(step);
            let found = program.bench.subject.violations();
            prop_assert!(found.is_empty(), "after {step:?}: {}", found[0]);
        }
        let (events, waits) = program.bench.cost();
        prop_assert!(waits <= steps.len() as u64 && events <= 2 * steps.len() as u64);
    }
}
