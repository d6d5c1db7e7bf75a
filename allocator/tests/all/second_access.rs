//! A thread that holds an access guard and asks for another one on the same memory gets an error
//! where it would wait for itself.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use aquifer_allocator::{AccessGuard, AllocError, Allocator, Config, Reservation, Storage};
use aquifer_device::AccessKind::{Read, Write};
use aquifer_device::{Device, Stream};
use aquifer_sim::{SimConfig, SimDriver};

const BYTES: u64 = 1 << 16;

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

    fn buffer(&self) -> Arc<Storage> {
        self.allocator.alloc_storage(BYTES, 1, &self.stream).unwrap()
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
        let part = buffer.clone();
        for (first, second) in [(Read, Read), (Read, Write), (Write, Read), (Write, Write)] {
            let access = AccessGuard::acquire(&bench.stream, &[(&buffer, first)]).unwrap();
            let refused = AccessGuard::acquire(&bench.stream, &[(&other, Write), (&part, second)]).unwrap_err();
            assert!(matches!(refused, AllocError::AccessHeld), "{refused}");
            assert!(refused.to_string().contains("end that first"), "{refused}");
            drop(AccessGuard::acquire(&bench.stream, &[(&other, Write)]).unwrap());
            drop(access);
            drop(AccessGuard::acquire(&bench.stream, &[(&other, Write), (&buffer, second)]).unwrap());
        }
        assert_eq!(bench.device.driver().take_violation(), None);
    });
}

#[test]
fn reservations_and_questions_are_refused_during_an_access() {
    in_time(|| {
        let bench = Bench::new();
        let buffer = bench.buffer();
        let access = AccessGuard::acquire(&bench.stream, &[(&buffer, Read)]).unwrap();
        assert!(matches!(Reservation::acquire(&buffer, Read), Err(AllocError::AccessHeld)));
        assert!(matches!(buffer.ticks_before(Read), Err(AllocError::AccessHeld)));
        drop(access);
        let reservation = Reservation::acquire(&buffer, Write).unwrap();
        let access = reservation.access(&bench.stream).unwrap();
        assert!(matches!(reservation.access(&bench.stream), Err(AllocError::AccessHeld)));
        drop(access);
        drop(reservation);
        assert_eq!(buffer.ticks_before(Write).unwrap().len(), 1);
    });
}

#[test]
fn a_reservation_dropped_during_an_access_of_its_thread_ends_with_the_access() {
    in_time(|| {
        let bench = Bench::new();
        let buffer = bench.buffer();
        let reservations = [0; 2].map(|_| Reservation::acquire(&buffer, Read).unwrap());
        let access = AccessGuard::acquire(&bench.stream, &[(&buffer, Read)]).unwrap();
        let (tell, told) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                let writer = bench.device.stream().unwrap();
                tell.send(()).unwrap();
                // Waits for the access guard, and the reservations.
                drop(AccessGuard::acquire(&writer, &[(&buffer, Write)]).unwrap());
            });
            told.recv().unwrap();
            drop(reservations);
            drop(access);
        });
        drop(Reservation::acquire(&buffer, Write).unwrap());
    });
}

#[test]
fn threads_wait_for_each_others_access_guards() {
    in_time(|| {
        let bench = Bench::new();
        let buffer = bench.buffer();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let stream = bench.device.stream().unwrap();
                    for round in 0..2000_u32 {
                        let kind = if round % 3 == 0 { Write } else { Read };
                        let access = AccessGuard::acquire(&stream, &[(&buffer, kind)]).unwrap();
                        assert!(matches!(&buffer.ticks_before(kind), Err(AllocError::AccessHeld)));
                        drop(access);
                        buffer.ticks_before(kind).unwrap();
                        drop(Reservation::acquire(&buffer, kind).unwrap());
                    }
                });
            }
        });
        assert_eq!(bench.device.driver().take_violation(), None);
    });
}
