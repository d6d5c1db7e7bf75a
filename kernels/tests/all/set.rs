//! Declarations, with arbitrary arguments, as a driver gets them from a program.

use aquifer_device::{AccessKind, AccessRange, DevicePtr, KernelArg, KernelMemory, Result};
use aquifer_kernels::{KERNELS, KernelParam, find};
use proptest::prelude::*;

use crate::bench::Bench;

/// Memory that accepts every access and records whether it was within the ranges.
struct Watched<'a> {
    accesses: &'a [AccessRange],
    outside: std::cell::Cell<bool>,
}

impl Watched<'_> {
    fn look(&self, at: DevicePtr, len: usize, kind: AccessKind) {
        let range = at.range(len as u64);
        let within = |access: &&AccessRange| {
            access.kind >= kind && access.ptr.0 <= range.start && range.end <= access.ptr.0 + access.bytes
        };
        if len > 0 && self.accesses.iter().find(within).is_none() {
            self.outside.set(true);
        }
    }
}

impl KernelMemory for Watched<'_> {
    fn read(&self, from: DevicePtr, into: &mut [u8]) -> Result<()> {
        self.look(from, into.len(), AccessKind::Read);
        into.fill(0x3C);
        Ok(())
    }

    fn write(&mut self, to: DevicePtr, bytes: &[u8]) -> Result<()> {
        self.look(to, bytes.len(), AccessKind::Write);
        Ok(())
    }
}

fn arg(param: KernelParam, number: u64) -> KernelArg {
    param.decode(number.to_le_bytes())
}

/// Small numbers, which are quick lengths, and numbers at the limits.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 0u64..50, 1 => any::<u64>(), 1 => (0u64..4).prop_map(|less| u64::MAX - less)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Declarations never panic, and host implementations access only the declared ranges.
    #[test]
    fn any_arguments_are_answered(index in any::<prop::sample::Index>(), numbers in proptest::collection::vec(number(), 10)) {
        let kernel = &KERNELS[index.index(KERNELS.len())];
        let args: Vec<_> = kernel.params.iter().zip(numbers).map(|(&param, number)| arg(param, number)).collect();
        let Ok(launch) = kernel.launch(None, args.clone(), 132) else { return Ok(()) };
        prop_assert!(!launch.grid.contains(&0) && (1..=1024).contains(&launch.block.iter().product::<u32>()));
        // Larger ones need too much host memory or time.
        let touched: u128 = launch.accesses.iter().map(|access| u128::from(access.bytes)).sum();
        if touched < 1 << 20 && launch.operations < 1 << 20 {
            let mut memory = Watched { accesses: &launch.accesses, outside: false.into() };
            kernel.run(&mut memory, &args).unwrap();
            prop_assert!(!memory.outside.get(), "{} {:?}", kernel.name, args);
        }
    }
}

#[test]
fn wrong_arguments_are_refused_by_name() {
    let fill = find("fill").unwrap();
    let args = [KernelArg::Ptr(DevicePtr(512)), KernelArg::U64(8), KernelArg::U64(0)];
    let launch = |args: &[KernelArg]| fill.launch(None, args.to_vec(), 1);
    assert_eq!(launch(&args).unwrap().accesses[0].bytes, 8);
    let few = launch(&args[..2]).map(drop).unwrap_err().to_string();
    assert!(few.contains("fill: 2 arguments given, 3 declared"), "{few}");
    let wrong = launch(&[args[0], args[1], KernelArg::F32(1.0)]).map(drop).unwrap_err().to_string();
    assert!(wrong.contains("argument 2 is F32(1.0) where a U64 is declared"), "{wrong}");
    let far = launch(&[args[0], KernelArg::U64(u64::MAX), args[2]]).map(drop).unwrap_err().to_string();
    assert!(far.contains("go past the last address"), "{far}");
}

#[test]
fn params_are_decoded_as_the_driver_reads_them() {
    let bytes = [1, 2, 3, 4, 5, 6, 7, 8];
    assert_eq!(KernelParam::U32.decode(bytes), KernelArg::U32(0x0403_0201));
    assert_eq!(KernelParam::Ptr.decode(bytes), KernelArg::Ptr(DevicePtr(0x0807_0605_0403_0201)));
    assert_eq!(KernelParam::F64.decode(1.5f64.to_le_bytes()), KernelArg::F64(1.5));
    assert_eq!(
        [KernelParam::Ptr, KernelParam::U32, KernelParam::U64, KernelParam::F32, KernelParam::F64]
            .map(KernelParam::bytes),
        [8, 4, 8, 4, 8]
    );
    assert!(KernelParam::U64.accepts(&KernelArg::U64(1)) && !KernelParam::Ptr.accepts(&KernelArg::U64(1)));
}

/// A launch from the declaration alone, as by a driver with a name and arguments.
#[test]
fn a_declaration_is_all_that_a_launch_needs() {
    let bench = Bench::new();
    if !bench.is_simulated() {
        return;
    }
    let memory = bench.upload(&[0u8; 32]);
    let args = vec![KernelArg::Ptr(memory.ptr()), KernelArg::U64(32), KernelArg::U64(0x0102_0304_0506_0708)];
    let launch = find("fill").unwrap().launch(None, args, 1).unwrap();
    let (accesses, host) = (launch.accesses.clone(), launch.host.clone().unwrap());
    assert_eq!(accesses, [AccessRange { ptr: memory.ptr(), bytes: 32, kind: AccessKind::Write }]);
    let mut watched = Watched { accesses: &launch.accesses, outside: false.into() };
    host(&mut watched, &launch.args).unwrap();
    assert!(!watched.outside.get());
}
