//! Programs of cudarc's on the stand-in driver, watched by its race detector.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test fails where it is wrong")]
#![expect(clippy::cast_possible_truncation, reason = "the numbers of these tests are small")]

#[allow(dead_code, reason = "a program of its own")]
#[path = "../../examples/branch.rs"]
mod branch;
mod graphs;

use std::sync::Arc;

use aquifer::Allocator;
use aquifer::buffer::{read, write};
use aquifer_cudarc::{AllocatorExt, Error, HostPinned, PoolSlice, StreamExt};
use aquifer_standin::StandinDevice;
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, DriverError, LaunchConfig, PushKernelArg, sys};
use cudarc::nvrtc::Ptx;

const N: usize = 1 << 12;

/// A device of the stand-in for one test. What uses it is dropped before it.
struct Gpu {
    memory: Allocator,
    axpy: CudaFunction,
    context: Arc<CudaContext>,
    standin: StandinDevice,
}

impl Gpu {
    fn new() -> Gpu {
        let standin = aquifer_standin::load().unwrap().add_device("256MiB,seed=3").unwrap();
        let context = CudaContext::new(standin.ordinal() as usize).unwrap();
        let module = context.load_module(Ptx::from_src(include_str!("../../examples/arithmetic.ptx"))).unwrap();
        let axpy = module.load_function("axpy_f32").unwrap();
        Gpu { memory: aquifer_cudarc::allocator(&context).unwrap(), axpy, context, standin }
    }

    fn streams<const K: usize>(&self) -> [Arc<CudaStream>; K] {
        std::array::from_fn(|_| self.context.new_stream().unwrap())
    }

    /// Turns cudarc's own events off.
    fn without_tracking(self) -> Gpu {
        // SAFETY: tests that do this look at what happens then; the stand-in's device code stays
        // within its buffers.
        unsafe { self.context.disable_event_tracking() };
        self
    }

    /// `y += alpha * x` with addresses.
    fn launch(&self, on: &Arc<CudaStream>, y: u64, x: u64, alpha: f32) -> Result<(), DriverError> {
        let n = N as u64;
        let mut launch = on.launch_builder(&self.axpy);
        // SAFETY: these are the kernel's parameters, and tests pass `N` elements.
        unsafe { launch.arg(&y).arg(&x).arg(&alpha).arg(&n).launch(LaunchConfig::for_num_elems(N as u32)) }.map(drop)
    }

    /// `y += alpha * x` with slices of cudarc's.
    fn launch_slices(&self, on: &Arc<CudaStream>, y: &mut PoolSlice<f32>, x: &PoolSlice<f32>) {
        let (alpha, n) = (1.0_f32, N as u64);
        let mut launch = on.launch_builder(&self.axpy);
        launch.arg(&mut **y).arg(&**x).arg(&alpha).arg(&n);
        // SAFETY: as in `launch`.
        unsafe { launch.launch(LaunchConfig::for_num_elems(N as u32)) }.unwrap();
    }

    /// Everything went back, now that nothing is used any more.
    fn assert_all_is_back(&self) {
        self.context.synchronize().unwrap();
        self.standin.run_destructors();
        self.memory.empty_cache().unwrap();
        let held = (self.memory.memory_allocated(), self.memory.memory_reserved());
        assert_eq!(held, (0, 0), "{}", self.memory.summary());
        self.assert_no_violation();
    }

    fn assert_no_violation(&self) {
        assert_eq!(self.standin.violations(), Vec::<String>::new());
    }
}

/// Numbers from 0 up to `end`, the same in each run.
fn draws(mut seed: u64) -> impl FnMut(usize) -> usize {
    move |end| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % end
    }
}

#[test]
fn random_work_through_with_is_ordered_and_computes_what_it_should() {
    for (seed, tracking) in (0..8).flat_map(|seed| [(seed, true), (seed, false)]) {
        let gpu = if tracking { Gpu::new() } else { Gpu::new().without_tracking() };
        let streams: [_; 3] = gpu.streams();
        let mut draw = draws(seed);
        let mut buffers: Vec<_> =
            (0..4).map(|at| (gpu.memory.alloc_zeros_on::<f32>(N, &streams[at % 3]).unwrap(), 0.0_f32)).collect();
        for step in 0..200 {
            let (on, at) = (&streams[draw(3)], draw(4));
            match draw(4) {
                0 => {
                    // Dropped with work in flight: its memory is used again at once.
                    let value = step as f32;
                    let (new, stream) =
                        (gpu.memory.alloc_on::<f32>(N, on).unwrap(), aquifer_cudarc::stream(on).unwrap());
                    buffers[at] = (new, value);
                    buffers[at].0.fill(value, &stream).unwrap();
                }
                1 => {
                    let host = vec![step as f32; N];
                    let done = on.with([write(&mut buffers[at].0)], |stream, [y]| {
                        Ok::<_, Error>(stream.memcpy_htod(&host, &mut *y.as_slice::<f32>(stream)?)?)
                    });
                    done.unwrap();
                    buffers[at].1 = step as f32;
                }
                _ => {
                    let mut taken = buffers.remove(at);
                    let (x, value) = &buffers[draw(3)];
                    on.with([read(x), write(&mut taken.0)], |stream, [x, y]| {
                        gpu.launch(stream, y.device_ptr(), x.device_ptr(), 0.5)
                    })
                    .unwrap();
                    taken.1 += 0.5 * value;
                    buffers.insert(at, taken);
                }
            }
        }
        for (buffer, value) in &buffers {
            let found = buffer.to_vec(&aquifer_cudarc::stream(&streams[0]).unwrap()).unwrap();
            assert!(found.iter().all(|found| found == value), "seed {seed}: {} for {value}", found[0]);
        }
        gpu.assert_no_violation();
    }
}

#[test]
fn slices_are_ordered_by_cudarc_and_their_memory_is_reused_in_order() {
    let gpu = Gpu::new();
    let [one, two] = gpu.streams();
    for step in 0..50 {
        let mut x = gpu.memory.alloc_slice_zeros::<f32>(N, &one).unwrap();
        let mut y = gpu.memory.alloc_slice_zeros::<f32>(N, &one).unwrap();
        one.memcpy_htod(&vec![step as f32; N], &mut *x).unwrap();
        gpu.launch_slices(&two, &mut y, &x);
        if step % 10 == 0 {
            assert_eq!(one.clone_dtoh(&*y).unwrap(), vec![step as f32; N]);
        }
        // Dropped with the launch in flight; `one` gets the memory at once.
    }
    gpu.assert_no_violation();
    assert!(gpu.memory.memory_reserved() <= 2 << 20, "{}", gpu.memory.summary());
    assert_eq!(gpu.memory.memory_allocated(), 0);
}

#[test]
fn slices_that_nothing_orders_are_refused() {
    let gpu = Gpu::new().without_tracking();
    let default = gpu.context.default_stream();
    let alone = gpu.memory.alloc_slice_zeros::<f32>(N, &default).unwrap();
    let [one, two] = gpu.streams();
    let refused = gpu.memory.alloc_slice_zeros::<f32>(N, &one).unwrap_err();
    assert!(matches!(refused, Error::Untracked) && refused.to_string().contains("event tracking is off"), "{refused}");
    // What there was before goes back once the whole context is done.
    drop(two);
    drop(alone);
    assert_eq!(gpu.memory.memory_allocated(), 0);
    gpu.assert_no_violation();
}

/// Such a slice has no events.
#[test]
fn slices_from_before_tracking_was_on_go_back_once_the_context_is_done() {
    let gpu = Gpu::new().without_tracking();
    let default = gpu.context.default_stream();
    let mut early = gpu.memory.alloc_slice_zeros::<f32>(N, &default).unwrap();
    // SAFETY: this test looks at what happens then.
    unsafe { gpu.context.enable_event_tracking() };
    let [other] = gpu.streams();
    other.join(&default).unwrap();
    other.memset_zeros(&mut *early).unwrap();
    drop(early);
    let [third] = gpu.streams();
    drop(gpu.memory.alloc_slice_zeros::<f32>(N, &default).unwrap());
    drop(gpu.memory.alloc_slice_zeros::<f32>(N, &third).unwrap());
    gpu.context.synchronize().unwrap();
    gpu.assert_no_violation();
}

#[test]
fn what_is_in_use_can_be_dropped_on_another_thread() {
    let gpu = Gpu::new();
    let [one, two] = gpu.streams();
    for step in 0..20 {
        let mut slice = gpu.memory.alloc_slice_zeros::<f32>(N, &one).unwrap();
        let host = gpu.memory.pinned_from_slice(&[step as f32; N]).unwrap();
        let host = HostPinned::new(host, &gpu.context).unwrap();
        two.memcpy_htod(&host, &mut *slice).unwrap();
        let imported = gpu.memory.import_slice(two.clone_dtod(&*slice).unwrap()).unwrap();
        std::thread::spawn(move || drop((slice, host, imported))).join().unwrap();
        drop(gpu.memory.alloc_slice_zeros::<f32>(N, &one).unwrap());
    }
    gpu.context.synchronize().unwrap();
    assert_eq!(gpu.memory.memory_allocated(), 0);
    gpu.context.check_err().unwrap();
    gpu.assert_no_violation();
}

#[test]
fn a_leaked_slice_is_freed_by_its_address() {
    let gpu = Gpu::new();
    let [stream] = gpu.streams();
    let slice = gpu.memory.alloc_slice_zeros::<f32>(N, &stream).unwrap();
    let ptr = slice.leak();
    assert!(gpu.memory.memory_allocated() >= 4 * N as u64);
    gpu.memory.free_raw(aquifer::device::DevicePtr(ptr)).unwrap();
    assert_eq!(gpu.memory.memory_allocated(), 0);
}

#[test]
fn slices_of_cudarcs_become_buffers() {
    for tracking in [true, false] {
        let gpu = if tracking { Gpu::new() } else { Gpu::new().without_tracking() };
        let [one, two] = gpu.streams();
        for step in 0..30 {
            let slice = one.clone_htod(&vec![step as f32; N]).unwrap();
            let x = gpu.memory.import_slice(slice).unwrap();
            let mut y = gpu.memory.alloc_zeros_on::<f32>(N, &two).unwrap();
            two.with([read(&x), write(&mut y)], |stream, [x, y]| {
                gpu.launch(stream, y.device_ptr(), x.device_ptr(), 2.0)
            })
            .unwrap();
            drop(x);
            if step % 10 == 0 {
                let found = y.to_vec(&aquifer_cudarc::stream(&two).unwrap()).unwrap();
                assert_eq!(found, vec![2.0 * step as f32; N]);
            }
        }
        gpu.assert_no_violation();
    }
}

#[test]
fn page_locked_memory_waits_for_the_copies_that_use_it_and_for_nothing_else() {
    // With one stream, cudarc records no events.
    for several in [false, true] {
        let gpu = Gpu::new();
        let streams: [_; 2] =
            if several { gpu.streams() } else { [gpu.context.default_stream(), gpu.context.default_stream()] };
        let mut host = HostPinned::new(gpu.memory.pinned::<f32>(N).unwrap(), &gpu.context).unwrap();
        let mut slices = streams.clone().map(|stream| gpu.memory.alloc_slice_zeros::<f32>(N, &stream).unwrap());
        for step in 0..20 {
            host.as_mut_slice().unwrap().fill(step as f32);
            for (stream, slice) in streams.iter().zip(&mut slices) {
                stream.memcpy_htod(&host, &mut **slice).unwrap();
            }
            streams[1].memcpy_dtoh(&*slices[0], &mut host).unwrap();
            assert_eq!(host.as_slice().unwrap()[N - 1], step as f32);
        }
        streams[0].memcpy_htod(&host, &mut *slices[0]).unwrap();
        let buffer = host.into_inner().unwrap();
        assert_eq!(buffer.read().unwrap()[0], 19.0);
        drop(HostPinned::new(buffer, &gpu.context).unwrap());
        drop(slices);
        gpu.assert_no_violation();
    }
}

#[test]
fn page_locked_memory_that_a_graph_uses_is_refused() {
    let gpu = Gpu::new();
    let stream = gpu.memory.device().stream().unwrap();
    let x = gpu.memory.from_slice(&[1.0_f32; N], &stream).unwrap();
    let mut host = gpu.memory.pinned::<f32>(N).unwrap();
    let graph = gpu.memory.graph(&stream, |stream| x.download(&mut host, stream).map(drop)).unwrap();
    let refused = HostPinned::new(host, &gpu.context).unwrap_err();
    assert!(refused.to_string().contains("drop the graph first"), "{refused}");
    graph.launch(&stream).unwrap();
    stream.synchronize().unwrap();
    gpu.assert_no_violation();
}

#[test]
fn everyone_gets_one_allocator_and_one_stream() {
    let gpu = Gpu::new();
    let [stream] = gpu.streams();
    let again = aquifer_cudarc::allocator(&CudaContext::new(gpu.standin.ordinal() as usize).unwrap()).unwrap();
    let held = again.alloc_on::<u8>(1000, &stream).unwrap();
    assert_eq!(gpu.memory.memory_allocated(), again.memory_allocated());
    let ids = [(); 2].map(|()| aquifer_cudarc::stream(&stream).unwrap().id());
    assert_eq!(ids[0], ids[1]);
    drop(held);
}

#[test]
fn errors_become_those_of_either_side() {
    let gpu = Gpu::new();
    let [stream] = gpu.streams();
    let full = gpu.memory.alloc_slice_zeros::<u8>(1 << 30, &stream).unwrap_err();
    assert!(full.is_out_of_memory() && full.to_string().contains("try: use a device of at least"), "{full}");
    assert_eq!(DriverError::from(full).0, sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    let driver: Error = DriverError(sys::CUresult::CUDA_ERROR_NOT_FOUND).into();
    assert_eq!(DriverError::from(driver).0, sys::CUresult::CUDA_ERROR_NOT_FOUND);
    let long = gpu.memory.alloc_slice_zeros::<u64>(usize::MAX, &stream).unwrap_err();
    assert_eq!(DriverError::from(long).0, sys::CUresult::CUDA_ERROR_INVALID_VALUE);

    let mut bytes = gpu.memory.alloc_on::<u8>(1001, &stream).unwrap();
    let cast = stream.with([write(&mut bytes)], |stream, [bytes]| bytes.as_slice::<f32>(stream).map(drop));
    assert!(matches!(cast, Err(Error::BadCast { bytes: 1001, .. })), "{cast:?}");
    let failed = stream.with([write(&mut bytes)], |_, [_]| Err::<(), _>(Error::library("CUBLAS_STATUS_NOT_SUPPORTED")));
    assert!(failed.unwrap_err().to_string().contains("CUBLAS_STATUS_NOT_SUPPORTED"));
}

#[test]
fn bodies_of_a_conditional_node_share_memory_and_the_chosen_one_runs() {
    let gpu = Gpu::new();
    branch::run(&gpu.context).unwrap();
    gpu.assert_no_violation();
}
