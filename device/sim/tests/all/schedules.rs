//! Models of timelines under a scheduler that explores interleavings; every driver call and atomic
//! access is a point where another thread may run. Run by `ci/schedules`.
//!
//! The simulated device judges: its race detector knows the true order of enqueued work, so an
//! event that claims to cover work enqueued after it shows as a race of the access that relied on
//! the claim.

use std::sync::Arc;
use std::time::Duration;

use aquifer_device::{Code, Device, DevicePtr, ErrorKind, Operation, Stream, StreamFlags, Tick};
use aquifer_sim::{Fault, SimConfig, SimDriver};
use shuttle::sync::Mutex;
use shuttle::thread;

const CELL: u64 = 512;

/// Explores `model` at random, and with few but well-placed switches.
fn explore(model: impl Fn() + Send + Sync + 'static) {
    let model = Arc::new(model);
    let again = model.clone();
    shuttle::check_random(move || model(), 3000);
    shuttle::check_pct(move || again(), 1500, 3);
}

/// A device whose memory is cells of one writer each, and the cells written so far with the ticks
/// after them.
struct World {
    sim: Arc<SimDriver>,
    device: Device,
    base: DevicePtr,
    written: Mutex<Vec<(u64, Tick)>>,
}

impl World {
    fn new() -> Arc<World> {
        let sim = SimDriver::new(SimConfig::new(1 << 24));
        let device = Device::new(sim.clone());
        let base = device.alloc(64 * CELL).unwrap();
        Arc::new(World { sim, device, base, written: Mutex::new(Vec::new()) })
    }

    fn stream(&self) -> Stream {
        self.device.stream().unwrap()
    }

    fn fill(&self, stream: &Stream, cell: u64) {
        stream.fill(self.base.offset(cell * CELL), 1, CELL).unwrap();
    }

    /// Writes a cell and announces the tick after it.
    fn produce(&self, stream: &Stream, cell: u64) {
        self.fill(stream, cell);
        let tick = stream.tick();
        self.written.lock().unwrap().push((cell, tick));
    }

    /// Overwrites each announced cell on `stream`, if `may` says that its tick allows that.
    fn consume(&self, stream: &Stream, mut may: impl FnMut(&Tick) -> bool) {
        let written = self.written.lock().unwrap().clone();
        for (cell, tick) in written {
            if may(&tick) {
                self.fill(stream, cell);
                self.assert_no_race();
            }
        }
    }

    fn assert_no_race(&self) {
        let found = self.sim.violations();
        assert!(found.is_empty(), "{}", found[0]);
    }

    fn pass(&self) {
        self.sim.advance(Duration::from_secs(1));
    }
}

fn spawn(world: &Arc<World>, run: impl FnOnce(&World) + Send + 'static) -> thread::JoinHandle<()> {
    let world = world.clone();
    thread::spawn(move || run(&world))
}

fn join(threads: impl IntoIterator<Item = thread::JoinHandle<()>>) {
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn t1_events_recorded_while_others_enqueue_and_take_ticks() {
    explore(|| {
        let world = World::new();
        let (one, two) = (world.stream(), world.stream());
        let (producer, recorder) = (one.clone(), one.clone());
        join([
            spawn(&world, move |world| (0..3).for_each(|cell| world.produce(&producer, cell))),
            spawn(&world, move |_| (0..2).for_each(|_| recorder.tick().cover().unwrap())),
            spawn(&world, move |world| {
                for _ in 0..3 {
                    world.consume(&two, |tick| two.wait_for(tick).is_ok());
                }
            }),
        ]);
        world.assert_no_race();
    });
}

#[test]
fn t1_covered_ticks_are_done_when_the_driver_says_so() {
    explore(|| {
        let world = World::new();
        let (one, two) = (world.stream(), world.stream());
        let (producer, asker) = (one.clone(), one.clone());
        join([
            spawn(&world, move |world| (0..3).for_each(|cell| world.produce(&producer, cell))),
            spawn(&world, move |world| {
                for _ in 0..2 {
                    asker.tick().cover().unwrap();
                    world.pass();
                }
            }),
            spawn(&world, move |world| {
                for _ in 0..3 {
                    world.consume(&two, |tick| tick.is_done().unwrap());
                }
            }),
        ]);
    });
}

#[test]
fn t1_user_events_cover_what_was_enqueued_before_them() {
    explore(|| {
        let world = World::new();
        let (one, two) = (world.stream(), world.stream());
        let (producer, recorded) = (one.clone(), one.clone());
        join([
            spawn(&world, move |world| (0..3).for_each(|cell| world.produce(&producer, cell))),
            spawn(&world, move |world| {
                let event = world.device.create_event(false).unwrap();
                for _ in 0..2 {
                    event.record(&recorded).unwrap();
                    two.wait_event(&event).unwrap();
                    world.consume(&two, |tick| two.is_ordered_after(tick));
                }
            }),
        ]);
    });
}

#[test]
fn t1_waiting_for_the_device_in_place_of_a_lost_event() {
    explore(|| {
        let world = World::new();
        let (one, two) = (world.stream(), world.stream());
        world.produce(&one, 0);
        let fault = Fault::Nth { operation: Some(Operation::Record), nth: 1, code: Code(999) };
        world.sim.inject(fault);
        drop(one);
        let ask = move |world: &World| world.consume(&two, |tick| tick.synchronize().is_ok());
        let tick = world.written.lock().unwrap()[0].1.clone();
        join([spawn(&world, ask), spawn(&world, move |_| tick.synchronize().unwrap())]);
        let written = world.written.lock().unwrap().clone();
        assert!(written.iter().all(|(_, tick)| tick.is_done().unwrap()));
    });
}

#[test]
fn t2_a_waiter_knows_no_more_than_its_event() {
    explore(|| {
        let world = World::new();
        let (one, two, three) = (world.stream(), world.stream(), world.stream());
        world.produce(&one, 0);
        let first = one.tick();
        let (second, learner) = (two.clone(), two.clone());
        join([
            spawn(&world, move |_| learner.wait_for(&first).unwrap()),
            spawn(&world, move |world| {
                let tick = second.tick();
                three.wait_for(&tick).unwrap();
                world.consume(&three, |tick| three.is_ordered_after(tick));
            }),
        ]);
    });
}

#[test]
fn t3_events_recycled_while_others_wait_for_them() {
    explore(|| {
        let world = World::new();
        let (one, two, three) = (world.stream(), world.stream(), world.stream());
        world.produce(&one, 0);
        let tick = one.tick();
        tick.cover().unwrap();
        let consumer = three.clone();
        let (other, rerecorder) = (tick.clone(), two.clone());
        join([
            spawn(&world, move |world| {
                tick.synchronize().unwrap();
                world.consume(&consumer, |tick| tick.is_done().unwrap());
            }),
            spawn(&world, move |world| {
                world.pass();
                other.is_done().unwrap();
            }),
            spawn(&world, move |world| {
                world.produce(&rerecorder, 1);
                rerecorder.tick().cover().unwrap();
            }),
        ]);
        let calls = world.device.driver_calls();
        assert_eq!(calls.of(Operation::DestroyEvent), 0);
    });
}

#[test]
fn t4_streams_destroyed_while_their_ticks_are_waited_for() {
    explore(|| {
        let world = World::new();
        let (one, two) = (world.stream(), world.stream());
        world.produce(&one, 0);
        join([
            spawn(&world, move |world| {
                world.produce(&one, 1);
                drop(one);
                let reused = world.stream();
                world.produce(&reused, 2);
            }),
            spawn(&world, move |world| {
                for _ in 0..2 {
                    world.consume(&two, |tick| two.wait_for(tick).is_ok());
                }
            }),
        ]);
        let written = world.written.lock().unwrap().clone();
        written.iter().for_each(|(_, tick)| tick.synchronize().unwrap());
    });
}

#[test]
fn t5_captures_begin_and_end_while_others_wait() {
    explore(|| {
        let world = World::new();
        let one = world.device.stream_with(StreamFlags::default()).unwrap();
        let two = world.stream();
        world.produce(&one, 0);
        let legacy = world.device.default_stream().tick();
        join([
            spawn(&world, move |world| {
                let capture = one.begin_capture().unwrap();
                world.fill(&one, 8);
                capture.end().expect("no tick may break a capture");
                world.produce(&one, 1);
            }),
            spawn(&world, move |world| {
                for _ in 0..3 {
                    world.consume(&two, |tick| match two.wait_for(tick) {
                        Ok(()) => true,
                        Err(error) => {
                            assert_eq!(error.kind, ErrorKind::Capture, "{error}");
                            false
                        }
                    });
                }
            }),
        ]);
        legacy.cover().unwrap();
    });
}

/// One thread enqueues on a stream that another one captures: its work runs once, or is refused,
/// and is in no graph.
#[test]
fn t5_what_is_enqueued_while_captures_are_held_off_is_in_no_graph() {
    explore(|| {
        let world = World::new();
        let (one, reader) = (world.stream(), world.stream());
        let owner = one.clone();
        join([
            spawn(&world, move |world| {
                for cell in 0..3 {
                    let Some(_held_off) = one.hold_off_captures() else { continue };
                    world.produce(&one, cell);
                }
            }),
            spawn(&world, move |_| {
                for _ in 0..2 {
                    let capture = owner.begin_capture().unwrap();
                    capture.end().expect("nothing may break a capture");
                }
            }),
        ]);
        let written = world.written.lock().unwrap().clone();
        for (cell, tick) in written {
            reader.wait_for(&tick).unwrap();
            let mut bytes = [0; 1];
            reader.download_blocking(&mut bytes, world.base.offset(cell * CELL)).unwrap();
            assert_eq!(bytes, [1], "it ran, and will not run again");
        }
        world.assert_no_race();
    });
}

/// One thread enqueues on the legacy stream while another one captures a blocking stream: what was
/// enqueued can be waited for during the capture, because an event covers it.
#[test]
fn t5_no_capture_begins_between_a_copy_on_the_legacy_stream_and_its_event() {
    explore(|| {
        let world = World::new();
        let (legacy, other) = (world.device.default_stream().clone(), world.stream());
        let blocking = world.device.stream_with(StreamFlags::default()).unwrap();
        join([
            spawn(&world, move |world| {
                let Some(held_off) = legacy.hold_off_captures() else { return };
                legacy.fill(world.base, 1, CELL).expect("nothing forbids it");
                let tick = legacy.tick();
                tick.cover().unwrap();
                drop(held_off);
                other.wait_for(&tick).unwrap();
            }),
            spawn(&world, move |_| {
                blocking.begin_capture().unwrap().end().expect("nothing may break a capture");
            }),
        ]);
    });
}

/// One thread captures while others make the calls that would break that: each comes before the
/// capture, after it, or is refused.
#[test]
fn t5_no_capture_is_broken_by_calls_that_wait_for_the_device() {
    explore(|| {
        let world = World::new();
        let one = world.device.stream_with(StreamFlags::default()).unwrap();
        let event = world.device.create_event(false).unwrap();
        let spare = world.device.alloc(CELL).unwrap();
        join([
            spawn(&world, move |world| {
                let capture = one.begin_capture().unwrap();
                world.fill(&one, 8);
                capture.end().expect("no thread may break a capture");
            }),
            spawn(&world, move |world| {
                for answer in
                    [world.device.synchronize(), world.device.free(spare), event.record(world.device.default_stream())]
                {
                    if let Err(error) = answer {
                        assert_eq!(error.kind, ErrorKind::Capture, "{error}");
                    }
                }
                world.device.settle();
            }),
        ]);
        world.assert_no_race();
    });
}

/// The thread that ends the capture announces it first, while the copy waits for that end.
#[test]
fn t5_a_capture_of_others_is_announced_while_a_blocking_copy_waits_for_its_end() {
    let model = || {
        let world = World::new();
        let blocking = world.device.stream_with(StreamFlags::default()).unwrap();
        join([
            spawn(&world, |world| match world.device.default_stream().upload_blocking(world.base, &[1; 64]) {
                Ok(()) => {}
                Err(error) => assert_eq!(error.kind, ErrorKind::Capture, "{error}"),
            }),
            spawn(&world, move |world| {
                let driver = world.device.driver();
                driver.begin_capture(blocking.raw()).unwrap();
                // The copy may have broken it: no thread knew of it yet.
                let announced = blocking.announce_capture();
                assert!(announced.as_ref().err().is_none_or(|error| error.kind == ErrorKind::Capture));
                let graph = driver.end_capture(blocking.raw());
                drop(announced);
                graph.into_iter().for_each(|graph| driver.destroy_graph(graph).unwrap());
            }),
        ]);
    };
    // At random only: the copy sleeps between attempts, and the other thread must run meanwhile.
    shuttle::check_random(model, 300);
}

#[test]
fn t5_no_capture_begins_on_a_stream_that_was_released_meanwhile() {
    explore(|| {
        let world = World::new();
        let raw = world.device.driver().create_stream(StreamFlags::default()).unwrap();
        #[allow(unsafe_code, reason = "adopting a stream is a promise")]
        // SAFETY: it is not destroyed.
        let mut adopted = unsafe { world.device.adopt_stream(raw) };
        let stream = adopted.stream().clone();
        join([
            spawn(&world, move |_| {
                if let Ok(capture) = stream.begin_capture() {
                    // Which the other thread may have done.
                    drop(capture.end());
                }
            }),
            spawn(&world, move |_| {
                // Refused while the stream captures; dropping it releases the stream in any case.
                let _refused = adopted.release();
            }),
            spawn(&world, |world| drop(world.device.synchronize())),
        ]);
        world.device.synchronize().expect("nothing captures any more");
    });
}

#[test]
fn t4_a_handle_that_threads_ask_for_and_forget_has_one_stream() {
    explore(|| {
        let world = World::new();
        let raw = world.device.driver().create_stream(StreamFlags::default()).unwrap();
        #[allow(unsafe_code, reason = "adopting a stream is a promise")]
        // SAFETY: it is not destroyed.
        let find = move |device: &Device| unsafe { device.stream_from_raw(raw) }.unwrap();
        join([
            spawn(&world, move |world| drop(find(&world.device).tick().cover())),
            spawn(&world, move |world| drop(find(&world.device).tick().cover())),
            spawn(&world, move |world| world.device.forget_stream(raw).unwrap()),
        ]);
        let stream = find(&world.device);
        assert_eq!((stream.id(), find(&world.device).id()), (stream.id(), stream.id()));
        stream.is_idle().expect("it takes calls");
        drop(stream.begin_capture().expect("captures may begin").end().unwrap());
        world.device.forget_stream(raw).unwrap();
        world.assert_no_race();
    });
}

#[test]
fn t4_ticks_of_a_destroyed_stream_are_answered_on_every_thread() {
    explore(|| {
        let world = World::new();
        let (gone, other) = (world.stream(), world.stream());
        world.produce(&gone, 0);
        let tick = gone.tick();
        drop(gone);
        world.pass();
        let asks: [fn(&Tick, &Stream); 4] = [
            |tick, _| assert!(tick.is_done().unwrap()),
            |tick, _| tick.cover().unwrap(),
            |tick, _| tick.synchronize().unwrap(),
            |tick, stream| stream.wait_for(tick).unwrap(),
        ];
        let before = world.device.driver_calls();
        join(asks.map(|ask| {
            let (tick, stream) = (tick.clone(), other.clone());
            spawn(&world, move |_| ask(&tick, &stream))
        }));
        let calls = world.device.driver_calls().since(&before);
        assert_eq!((calls.of(Operation::Synchronize), calls.of(Operation::Record)), (0, 0), "the last event answers");
        world.assert_no_race();
    });
}
