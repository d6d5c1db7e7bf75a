//! A thread that has a turn with memory and asks for more of it is told, where it would wait for itself.
#![expect(clippy::unwrap_used, reason = "a test fails where it is wrong")]

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use aquifer_allocator::{AllocError, Allocator, Buffer, Claim, Config, Turn};
use aquifer_device::AccessKind::{Read, Write};
use aquifer_device::sim::{SimConfig, SimDriver};
use aquifer_device::{Device, Stream};

const BYTES: usize = 1 << 16;

struct Bench {
    device: Device,
    allocator: Allocator,
    stream: Stream,
}

impl Bench {
    fn new() -> Bench {
        let device = Device::new(SimDriver::new(SimConfig::new(64 << 20)));
        let allocator = Allocator::new(&device, Config::default()).unwrap();
        let stream = device.stream().unwrap();
        Bench { device, allocator, stream }
    }

    fn buffer(&self) -> Buffer<u8> {
        self.allocator.alloc(BYTES, &self.stream).unwrap()
    }
}

/// Runs `test` on a thread of its own, and fails where that waits for ever.
fn in_time(test: impl FnOnce() + Send + 'static) {
    let (tell, told) = mpsc::channel();
    let thread = thread::spawn(move || {
        test();
        tell.send(()).unwrap();
    });
    if let Err(mpsc::RecvTimeoutError::Timeout) = told.recv_timeout(Duration::from_secs(20)) {
        panic!("a thread waits for itself");
    }
    thread.join().unwrap();
}

#[test]
fn a_second_turn_is_refused_on_the_same_thread_and_only_while_the_first_lasts() {
    in_time(|| {
        let bench = Bench::new();
        let (buffer, other) = (bench.buffer(), bench.buffer());
        let part = buffer.slice(100..200);
        for (first, second) in [(Read, Read), (Read, Write), (Write, Read), (Write, Write)] {
            let turn = Turn::take(&bench.stream, &[(buffer.storage(), first)]).unwrap();
            let refused = Turn::take(&bench.stream, &[(other.storage(), Write), (part.storage(), second)]).unwrap_err();
            assert!(matches!(refused, AllocError::TurnHeld), "{refused}");
            assert!(refused.to_string().contains("end that first"), "{refused}");
            drop(Turn::take(&bench.stream, &[(other.storage(), Write)]).unwrap());
            drop(turn);
            drop(Turn::take(&bench.stream, &[(other.storage(), Write), (buffer.storage(), second)]).unwrap());
        }
        assert_eq!(bench.device.driver().take_violation(), None);
    });
}

#[test]
fn claims_and_questions_are_refused_during_a_turn() {
    in_time(|| {
        let bench = Bench::new();
        let buffer = bench.buffer();
        let turn = Turn::take(&bench.stream, &[(buffer.storage(), Read)]).unwrap();
        assert!(matches!(Claim::take(buffer.storage(), Read), Err(AllocError::TurnHeld)));
        assert!(matches!(buffer.storage().ticks_before(Read), Err(AllocError::TurnHeld)));
        drop(turn);
        let claim = Claim::take(buffer.storage(), Write).unwrap();
        let turn = claim.turn(&bench.stream).unwrap();
        assert!(matches!(claim.turn(&bench.stream), Err(AllocError::TurnHeld)));
        drop(turn);
        drop(claim);
        assert_eq!(buffer.storage().ticks_before(Write).unwrap().len(), 1);
    });
}

#[test]
fn a_claim_that_ends_during_a_turn_of_its_thread_is_over_after_the_turn() {
    in_time(|| {
        let bench = Bench::new();
        let buffer = bench.buffer();
        let claims = [0; 2].map(|_| Claim::take(buffer.storage(), Read).unwrap());
        let turn = Turn::take(&bench.stream, &[(buffer.storage(), Read)]).unwrap();
        let (tell, told) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                let writer = bench.device.stream().unwrap();
                tell.send(()).unwrap();
                // Waits for the turn, and the claims.
                drop(Turn::take(&writer, &[(buffer.storage(), Write)]).unwrap());
            });
            told.recv().unwrap();
            drop(claims);
            drop(turn);
        });
        drop(Claim::take(buffer.storage(), Write).unwrap());
    });
}

#[test]
fn threads_wait_for_each_others_turns() {
    in_time(|| {
        let bench = Bench::new();
        let buffer = bench.buffer();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let stream = bench.device.stream().unwrap();
                    for round in 0..2000_u32 {
                        let kind = if round % 3 == 0 { Write } else { Read };
                        let turn = Turn::take(&stream, &[(buffer.storage(), kind)]).unwrap();
                        assert!(matches!(buffer.storage().ticks_before(kind), Err(AllocError::TurnHeld)));
                        drop(turn);
                        buffer.storage().ticks_before(kind).unwrap();
                        drop(Claim::take(buffer.storage(), kind).unwrap());
                    }
                });
            }
        });
        assert_eq!(bench.device.driver().take_violation(), None);
    });
}
