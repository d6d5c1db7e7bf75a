//! Panics that are caught.

use std::panic::{RefUnwindSafe, UnwindSafe, catch_unwind};

use aquifer::prelude::*;

#[test]
fn buffers_work_after_a_panic_that_was_caught() -> Result<(), aquifer::Error> {
    let device = aquifer::open("sim:1GiB,violations=panic")?;
    let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    let mut x = memory.alloc_zeros::<f32>(4, &stream)?;
    assert!(catch_unwind(|| x.slice(3..9).len()).is_err());
    // Two writes that nothing orders.
    let unordered = || {
        let other = device.stream()?;
        stream.fill(x.ptr(), 1, 16)?;
        other.fill(x.ptr(), 2, 16)?;
        device.synchronize()
    };
    assert!(catch_unwind(unordered).is_err());
    x.fill(1.0, &stream)?;
    assert_eq!((memory.from_slice(&[2.0_f32], &stream)?.item(&stream)?, x.to_vec(&stream)?), (2.0, vec![1.0; 4]));
    Ok(())
}

fn stays_usable<T: UnwindSafe + RefUnwindSafe>() {}

/// Nothing to run: the types are checked when this is compiled.
#[test]
fn handles_may_be_used_after_a_panic_that_was_caught() {
    stays_usable::<aquifer::Error>();
    #[cfg(all(feature = "cuda", target_pointer_width = "64"))]
    stays_usable::<aquifer::device::cuda::CudaDriver>();
    {
        use aquifer_device::{AnnouncedCapture, Capture, Device, Event, ExternalStream, Graph, Stream, Tick};
        stays_usable::<Device>();
        stays_usable::<Stream>();
        stays_usable::<ExternalStream>();
        stays_usable::<Event>();
        stays_usable::<Tick>();
        stays_usable::<Capture>();
        stays_usable::<AnnouncedCapture>();
        stays_usable::<Graph>();
        #[cfg(feature = "sim")]
        stays_usable::<(aquifer::device::sim::SimDriver, aquifer::device::sim::SimConfig)>();
    }
    {
        use aquifer::buffer::Access;
        use aquifer::{Allocator, Buffer, View, ViewMut};
        use aquifer_allocator::{
            AccessGuard, Allocation, CaptureRoute, Config, Exportable, Growable, PinnedMapping, PoolRoute, PrivatePool,
            RawOwner, Registration, Reservation, Snapshot, Storage, TagScope, WakeLock,
        };
        stays_usable::<(Allocator, Config)>();
        stays_usable::<Buffer<f32>>();
        stays_usable::<View<'_, f32>>();
        stays_usable::<ViewMut<'_, f32>>();
        stays_usable::<Storage>();
        stays_usable::<Allocation>();
        stays_usable::<Growable>();
        stays_usable::<Exportable>();
        stays_usable::<PinnedMapping>();
        stays_usable::<RawOwner>();
        stays_usable::<Access<'_>>();
        stays_usable::<AccessGuard<'_>>();
        stays_usable::<Reservation>();
        stays_usable::<WakeLock>();
        stays_usable::<PrivatePool>();
        stays_usable::<PoolRoute>();
        stays_usable::<CaptureRoute>();
        stays_usable::<Registration>();
        stays_usable::<TagScope>();
        stays_usable::<Snapshot>();
    }
    {
        use aquifer_kernels::{Kernels, Operand, Target};
        stays_usable::<Kernels>();
        stays_usable::<Operand<'_>>();
        stays_usable::<Target<'_>>();
    }
    {
        use aquifer::tensor::{Checkpoint, ParamSet, Place};
        use aquifer::transfer::{
            Downloaded, PinnedPool, PinnedSlice, PinnedSliceMut, Prefetcher, Region, Resident, Spillable, Spiller,
            Timer, Transfer, TransferBatch,
        };
        use aquifer::{Pending, PinnedBuffer, Tensor};
        stays_usable::<Transfer>();
        stays_usable::<Pending<f32>>();
        stays_usable::<TransferBatch>();
        stays_usable::<Downloaded<f32>>();
        stays_usable::<PinnedPool>();
        stays_usable::<PinnedBuffer<f32>>();
        stays_usable::<PinnedSlice<'_, f32>>();
        stays_usable::<PinnedSliceMut<'_, f32>>();
        stays_usable::<Region<'_>>();
        stays_usable::<Tensor>();
        stays_usable::<Place>();
        stays_usable::<ParamSet>();
        stays_usable::<Checkpoint>();
        stays_usable::<Prefetcher<Vec<f32>>>();
        stays_usable::<Spiller>();
        stays_usable::<Spillable<f32>>();
        stays_usable::<Resident<'_, f32>>();
        stays_usable::<Timer>();
    }
}
