//! Invalid launches are refused with a reason and have no effect.

use std::time::Duration;

use aquifer::Buffer;
use aquifer_device::{Code, Device, DeviceInfo, DeviceLabel, DeviceMismatch, Operation};
use aquifer_kernels::{DType, KernelError, Kernels, OperandFault, Strided, Target};
use aquifer_sim::{Fault as Failing, Preset, SimConfig, SimDriver};

use crate::bench::{Bench, bytes_as};

/// The operand and the fault of an operand's error of the expected kernel.
#[track_caller]
fn fault(kernel: &str, result: Result<(), KernelError>) -> (&'static str, OperandFault) {
    match result {
        Err(KernelError::Operand(error)) => {
            assert_eq!(error.kernel, kernel);
            let text = error.to_string();
            for part in [kernel, error.operand, error.dtype.name(), &error.device.to_string()] {
                assert!(text.contains(part), "{text} without {part}");
            }
            (error.operand, error.fault)
        }
        other => panic!("{other:?}"),
    }
}

fn len(expected: u64) -> OperandFault {
    OperandFault::Len { expected }
}

fn dtype(expected: DType) -> OperandFault {
    OperandFault::DType { expected: vec![expected] }
}

fn overlap(other: &'static str) -> OperandFault {
    OperandFault::Overlap { other }
}

const FLOATS: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];

#[test]
fn lengths() {
    let bench = Bench::new();
    let (k, s) = (&bench.kernels, &bench.stream);
    let (mut ten, mut nine) = (bench.upload(&[0f32; 10]), bench.upload(&[0f32; 9]));
    let (mut words, mut bytes) = (bench.upload(&[0u64; 3]), bench.upload(&[0u8; 10]));
    let square = Strided::new(&[3, 3], &[4, 1]).unwrap();
    assert_eq!(fault("add", k.add(s, &ten, &nine, &mut ten.share())), ("b", len(10)));
    assert_eq!(fault("add", k.add(s, &ten, &ten, &mut nine)), ("to", len(10)));
    assert_eq!(fault("axpy", k.axpy(s, 1.0, &ten, &mut nine)), ("y", len(10)));
    assert_eq!(fault("cast", k.cast(s, &nine, &mut bytes)), ("to", len(9)));
    assert_eq!(fault("pattern_verify", k.pattern_verify(s, &ten, 0, &mut words)), ("findings", len(2)));
    assert!(k.mismatches(s, &words).is_err());
    let short = OperandFault::TooShort { needed: 11 };
    assert_eq!(fault("gather", k.gather(s, &ten, &square, &mut nine)), ("from", short.clone()));
    assert_eq!(fault("scatter", k.scatter(s, &nine, &mut ten, &square)), ("to", short));
    assert_eq!(fault("gather", k.gather(s, &ten, &square, &mut ten.share())), ("to", len(9)));
    assert_eq!(fault("scatter", k.scatter(s, &ten, &mut nine, &square)), ("from", len(9)));
    let mut one = nine.slice(..1).share();
    assert_eq!(
        fault("reduce_sum", k.reduce_sum(s, &ten, &mut words, &mut one)),
        ("scratch", OperandFault::TooShort { needed: Kernels::SUM_SCRATCH_LEN as u64 })
    );
    let mut scratch = bench.alloc::<u64>(Kernels::SUM_SCRATCH_LEN as u64);
    assert_eq!(fault("reduce_sum", k.reduce_sum(s, &ten, &mut scratch, &mut nine)), ("to", len(1)));
    assert_eq!(fault("matmul", k.matmul(s, &ten, &ten, &mut nine, [3, 3, 3])), ("a", len(9)));
    assert_eq!(fault("matmul", k.matmul(s, &nine, &ten, &mut nine.share(), [3, 3, 3])), ("b", len(9)));
    assert_eq!(fault("matmul", k.matmul(s, &nine, &nine.share(), &mut ten, [3, 3, 3])), ("c", len(9)));
    let wrong = k.matmul(s, &nine, &nine, &mut ten, [u64::MAX, 2, 1]);
    assert!(matches!(wrong, Err(KernelError::Argument { .. })), "{wrong:?}");
}

#[test]
fn dtypes() {
    let bench = Bench::new();
    let (k, s) = (&bench.kernels, &bench.stream);
    let (mut floats, mut doubles, mut ints) =
        (bench.upload(&[0f32; 4]), bench.upload(&[0f64; 4]), bench.upload(&[0i32; 4]));
    assert_eq!(fault("fill", k.fill(s, &mut floats, 1i32)), ("to", dtype(DType::I32)));
    assert_eq!(fault("add", k.add(s, &floats, &doubles, &mut floats.share())), ("b", dtype(DType::F32)));
    assert_eq!(fault("add", k.add(s, &floats, &floats, &mut ints)), ("to", dtype(DType::F32)));
    assert_eq!(fault("axpy", k.axpy(s, 1.0, &floats, &mut doubles)), ("y", dtype(DType::F32)));
    let any_float = OperandFault::DType { expected: FLOATS.to_vec() };
    assert_eq!(fault("axpy", k.axpy(s, 1.0, &ints, &mut ints.share())), ("x", any_float));
    let any_other = DType::ALL.iter().copied().filter(|&other| other != DType::F32).collect();
    assert_eq!(
        fault("cast", k.cast(s, &floats, &mut floats.share())),
        ("to", OperandFault::DType { expected: any_other })
    );
    let row = Strided::new(&[4], &[1]).unwrap();
    assert_eq!(fault("gather", k.gather(s, &floats, &row, &mut ints)), ("to", dtype(DType::F32)));
    assert_eq!(fault("scatter", k.scatter(s, &floats, &mut ints, &row)), ("to", dtype(DType::F32)));
    let matrices = OperandFault::DType { expected: FLOATS[..3].to_vec() };
    assert_eq!(fault("matmul", k.matmul(s, &doubles, &doubles, &mut doubles.share(), [2, 2, 2])), ("a", matrices));
    assert_eq!(fault("matmul", k.matmul(s, &floats, &ints, &mut doubles, [2, 2, 2])), ("b", dtype(DType::F32)));
    assert_eq!(fault("matmul", k.matmul(s, &floats, &floats, &mut doubles, [2, 2, 2])), ("c", dtype(DType::F32)));
    let mut scratch = bench.alloc::<u64>(Kernels::SUM_SCRATCH_LEN as u64);
    let mut one = doubles.slice(..1).share();
    assert_eq!(fault("reduce_sum", k.reduce_sum(s, &floats, &mut scratch, &mut one)), ("to", dtype(DType::F32)));
    assert_eq!(fault("reduce_sum", k.reduce_sum(s, &ints, &mut scratch, &mut one)), ("to", dtype(DType::I64)));
    let text = k.axpy(s, 1.0, &ints, &mut ints.share()).unwrap_err().to_string();
    let device = bench.device.label();
    assert_eq!(text, format!("kernel axpy: `x`, 4 elements of i32 on {device}, must be of f16 or bf16 or f32 or f64"));
}

#[test]
fn alignment_and_whole_elements() {
    let bench = Bench::new();
    let (k, s) = (&bench.kernels, &bench.stream);
    let (bytes, mut floats) = (bench.upload(&[0u8; 100]), bench.upload(&[0f32; 4]));
    let odd = bytes.slice(1..17);
    let misaligned = OperandFault::Misaligned { ptr: odd.ptr() };
    assert_eq!(fault("axpy", k.axpy(s, 1.0, bytes_as(&odd, DType::F32), &mut floats)), ("x", misaligned));
    let ragged = Target::new(bytes_as(&bytes, DType::F64));
    assert_eq!(fault("fill", k.fill(s, ragged, 0f64)), ("to", OperandFault::Ragged { bytes: 100 }));
}

#[test]
fn harmful_overlap_is_refused() {
    let bench = Bench::new();
    let (k, s) = (&bench.kernels, &bench.stream);
    let memory = bench.upload(&[1f32; 100]);
    let part = |range: std::ops::Range<usize>| memory.slice(range).share();
    assert_eq!(fault("add", k.add(s, &part(0..10), &part(50..60), &mut part(59..69))), ("to", overlap("b")));
    assert_eq!(fault("axpy", k.axpy(s, 1.0, &part(0..10), &mut part(9..19))), ("y", overlap("x")));
    let row = Strided::new(&[4], &[2]).unwrap();
    assert_eq!(fault("gather", k.gather(s, &part(0..7), &row, &mut part(6..10))), ("to", overlap("from")));
    assert_eq!(fault("scatter", k.scatter(s, &part(0..4), &mut part(3..10), &row)), ("to", overlap("from")));
    assert_eq!(
        fault("matmul", k.matmul(s, &part(0..4), &part(4..8), &mut part(7..11), [2, 2, 2])),
        ("c", overlap("b"))
    );
    k.add(s, &part(0..10), &part(10..20), &mut part(20..30)).unwrap();
    k.add(s, &part(0..10), &part(0..10), &mut part(0..10)).unwrap();
    k.axpy(s, 1.0, &part(0..10), &mut part(0..10)).unwrap();
    assert_eq!(bench.download(&part(0..11)), [[4.0; 10].as_slice(), &[1.0]].concat());

    let words = bench.upload(&[0u64; 2000]);
    let words = |range: std::ops::Range<usize>| words.slice(range).share();
    let verified = k.pattern_verify(s, &words(0..9), 0, &mut words(8..10));
    assert_eq!(fault("pattern_verify", verified), ("findings", overlap("from")));
    assert_eq!(
        fault("reduce_sum", k.reduce_sum(s, &words(0..9), &mut words(8..1100), &mut words(1200..1201))),
        ("scratch", overlap("from"))
    );
    assert_eq!(
        fault("reduce_sum", k.reduce_sum(s, &words(0..9), &mut words(9..1100), &mut words(9..10))),
        ("to", overlap("scratch"))
    );
    let bytes = bench.upload(&[0u8; 16]);
    let same = bytes.share();
    let cast = k.cast(s, &bytes.slice(..4), Target::new(bytes_as(&same, DType::F32)));
    assert_eq!(fault("cast", cast), ("to", overlap("from")));
}

#[test]
fn devices() {
    let (bench, elsewhere) = (Bench::new(), Bench::on(Device::new(SimDriver::new(SimConfig::new(64 << 20)))));
    let mut there = elsewhere.upload(&[0f32; 4]);
    let (here, other) = (bench.device.label(), elsewhere.device.label());
    let operand = bench.kernels.fill(&bench.stream, &mut there, 1f32).unwrap_err();
    assert_eq!(
        operand.to_string(),
        format!("kernel fill: `to`, 4 elements of f32 on {other}, is needed on {here}, where the kernels were loaded")
    );
    let wrong =
        OperandFault::WrongDevice { devices: DeviceMismatch::between(elsewhere.device.id(), bench.device.id()) };
    assert_eq!(fault("fill", Err(operand)), ("to", wrong));
    let stream = bench.kernels.fill(&elsewhere.stream, &mut there, 1f32).unwrap_err();
    assert_eq!(
        stream.to_string(),
        format!(
            "kernel fill: the stream belongs to {other}, and this needs one of {here}, where the kernels were loaded"
        )
    );
}

#[test]
fn numbers() {
    let bench = Bench::new();
    let long = bench.kernels.spin(&bench.stream, Kernels::SPIN_MAX + Duration::from_nanos(1)).unwrap_err();
    assert!(long.to_string().starts_with("kernel spin: time is 1.000000001s, more than 1s"), "{long}");
    let (four, mut to) = (bench.upload(&[0u8; 4]), bench.upload(&[0u8; 4]));
    let twice = Strided::new(&[4], &[0]).unwrap();
    let refused = bench.kernels.scatter(&bench.stream, &four, &mut to, &twice).unwrap_err();
    assert!(refused.to_string().contains("two elements at one place"), "{refused}");
}

#[test]
fn nothing_that_is_refused_is_launched() {
    let bench = Bench::new();
    let (mut ten, nine) = (bench.upload(&[0f32; 10]), bench.upload(&[0f32; 9]));
    let before = bench.device.driver_calls();
    assert!(bench.kernels.axpy(&bench.stream, 1.0, &nine, &mut ten).is_err());
    // Operations without elements are not launched either.
    let mut empty: Buffer<f32> = bench.alloc(0);
    bench.kernels.fill(&bench.stream, &mut empty, 1f32).unwrap();
    bench.kernels.axpy(&bench.stream, 1.0, &empty.share(), &mut empty).unwrap();
    assert_eq!(bench.device.driver_calls().since(&before).total(), 0);
}

#[test]
fn old_devices_and_drivers_are_refused() {
    assert!(DType::BF16.missing_on((7, 5)).is_some_and(|what| what.contains("8.0")));
    assert!(DType::BF16.missing_on((8, 6)).is_some_and(|what| what.contains("9.0")));
    assert!(DType::F16.missing_on((5, 0)).is_some());
    for dtype in DType::ALL {
        assert_eq!(dtype.missing_on((9, 0)), None);
        assert_eq!(dtype.name().parse(), Ok(*dtype));
    }
    assert_eq!("f8".parse::<DType>().unwrap_err().to_string(), "unknown dtype \"f8\"");
    let old = DeviceLabel::from(&DeviceInfo::new("cuda", 0, "Old", 1));
    let error = KernelError::TooOld { device: old, capability: (7, 0), needs: (7, 5) };
    assert_eq!(error.to_string(), "cuda:0 (Old) has compute capability 7.0; the kernels need 7.5 or later");
    for &preset in Preset::ALL {
        Kernels::load(&Device::new(SimDriver::new(SimConfig::preset(preset)))).unwrap();
    }
}

fn nth(operation: Operation, nth: u64, code: Code) -> Failing {
    Failing::Nth { operation: Some(operation), nth, code }
}

#[test]
fn after_a_failing_driver_everything_is_usable() {
    let sim = SimDriver::new(SimConfig::new(64 << 20));
    // The third module cannot be loaded; the others are unloaded.
    sim.inject(nth(Operation::LoadModule, 3, Code::OUT_OF_MEMORY));
    let device = Device::new(sim.clone());
    let failed = Kernels::load(&device).unwrap_err();
    assert!(matches!(&failed, KernelError::Device(error) if error.is_out_of_memory()), "{failed}");
    assert!(failed.to_string().contains("headroom_mb"), "{failed}");
    device.settle();
    assert_eq!(device.driver_calls().of(Operation::UnloadModule), 2);

    let bench = Bench::on(device);
    let other = bench.device.stream().unwrap();
    let mut memory = bench.upload(&[1u8; 100]);
    for operation in [Operation::Record, Operation::Wait, Operation::Launch] {
        sim.inject(nth(operation, 1, Code(999)));
        let failed = bench.kernels.fill(&other, &mut memory, 2u8).unwrap_err();
        assert!(failed.to_string().contains(operation.name()), "{failed}");
    }
    assert_eq!(bench.download(&memory), [1; 100]);
    bench.kernels.fill(&other, &mut memory, 3u8).unwrap();
    assert_eq!(bench.download(&memory), [3; 100]);
}
