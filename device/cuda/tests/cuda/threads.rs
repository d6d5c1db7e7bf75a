//! Any thread makes any call, and finds its own context as it left it.

use std::sync::Barrier;
use std::thread;

use aquifer_cuda::{self as cuda, CudaDriver};
use aquifer_device::{Code, Device, Driver, StreamFlags};
use cudarc::driver::{CudaContext, result};

use crate::bench::{Bench, MIB};

fn current() -> u64 {
    result::ctx::get_current().unwrap().map_or(0, |context| context as u64)
}

#[test]
fn a_thread_keeps_the_context_that_it_had() {
    let bench = Bench::new();
    let other = Bench::new();
    thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(current(), 0);
            let memory = bench.driver.alloc(MIB).unwrap();
            assert_eq!(current(), 0, "a call on a thread without a context leaves it without");
            let context = CudaContext::new(other.device.ordinal() as usize).unwrap();
            let theirs = current();
            assert_eq!(theirs, context.cu_ctx() as u64);
            bench.driver.free(memory).unwrap();
            assert!(bench.driver.free(memory).is_err());
            assert_eq!(current(), theirs, "and one with another context with that");
        });
    });
}

/// cudarc makes the context of an object that it drops current, and leaves it current, even if the
/// context ends then.
#[test]
fn a_thread_keeps_its_context_when_objects_of_cudarc_are_dropped() {
    let (bench, other) = (Bench::new(), Bench::new());
    let context = |bench: &Bench| CudaContext::new(bench.device.ordinal() as usize).unwrap();
    let theirs = context(&other);
    let keeps = |what: &str, drops: &mut dyn FnMut()| {
        theirs.bind_to_thread().unwrap();
        drops();
        assert_eq!(current(), theirs.cu_ctx() as u64, "{what}");
    };
    let device = Device::new(bench.driver.clone());
    let adopted = cuda::stream(&device, &context(&bench).new_stream().unwrap()).unwrap();
    keeps("the last reference to an adopted stream", &mut || device.forget_stream(adopted.raw()).unwrap());
    let mut driver = Some(CudaDriver::from_context(context(&bench)).unwrap());
    keeps("a driver of the primary context", &mut || driver = None);
    let another = CudaContext::new_non_primary(bench.device.ordinal() as usize, 0).unwrap();
    let mut driver = Some(CudaDriver::from_context(another).unwrap());
    keeps("the last driver of a context", &mut || driver = None);
    let mut opened = Some(cuda::shared(bench.device.ordinal()).unwrap());
    cuda::context_of(opened.as_ref().unwrap()).unwrap();
    keeps("a device of which cudarc made an object", &mut || opened = None);
    let driver = CudaDriver::from_context(context(&bench)).unwrap();
    let nothing = thread::spawn(move || (drop(driver), current()).1).join().unwrap();
    assert_eq!(nothing, 0, "a thread that had none");
}

#[test]
fn a_thread_may_destroy_objects_of_another_thread() {
    let bench = Bench::new();
    let driver = &*bench.driver;
    let (stream, event, memory) =
        (bench.stream(), driver.create_event(false).unwrap(), driver.alloc_async(MIB, RawLegacy).unwrap());
    thread::scope(|scope| {
        scope.spawn(|| {
            driver.record(event, stream).unwrap();
            driver.synchronize_event(event).unwrap();
            driver.free_async(memory, stream).unwrap();
            driver.destroy_event(event).unwrap();
            driver.destroy_stream(stream).unwrap();
        });
    });
    let Bench { driver, device } = bench;
    thread::spawn(move || drop(driver)).join().unwrap();
    drop(device);
}

#[allow(non_upper_case_globals, reason = "short names for the test")]
const RawLegacy: aquifer_device::RawStream = aquifer_device::RawStream::LEGACY;

#[test]
fn objects_destroyed_while_other_threads_use_them_cause_errors_only() {
    const ROUNDS: usize = 300;
    let bench = Bench::new();
    let driver = &*bench.driver;
    let (stream, barrier) = (bench.stream(), Barrier::new(3));
    let events: Vec<_> = (0..ROUNDS).map(|_| driver.create_event(false).unwrap()).collect();
    let streams: Vec<_> = (0..ROUNDS).map(|_| driver.create_stream(StreamFlags::default()).unwrap()).collect();
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for round in 0..ROUNDS {
                    barrier.wait();
                    for _ in 0..20 {
                        let used = [
                            driver.record(events[round], stream),
                            driver.record(events[round], streams[round]),
                            driver.query_event(events[round]).map(drop),
                            driver.synchronize_stream(streams[round]),
                        ];
                        for error in used.into_iter().filter_map(Result::err) {
                            assert_eq!(error.code, Code::INVALID_HANDLE, "{error}");
                        }
                    }
                }
            });
        }
        scope.spawn(|| {
            for round in 0..ROUNDS {
                barrier.wait();
                driver.destroy_event(events[round]).unwrap();
                driver.destroy_stream(streams[round]).unwrap();
            }
        });
    });
    driver.destroy_stream(stream).unwrap();
}
