from .animation import ANIMATION_FORMATS as ANIMATION_FORMATS, save_animation as save_animation
from .chart import (
    Chart as Chart,
    check_picture as check_picture,
    draw_charts as draw_charts,
    draw_curves as draw_curves,
)
from .export_format import ExportedRun as ExportedRun, ExportFormat as ExportFormat
from .gaussian import (
    gaussian_flow as gaussian_flow,
    gaussian_prediction as gaussian_prediction,
    normal_quantiles as normal_quantiles,
)
from .generation import Generated as Generated, ImageMetric as ImageMetric
from .image_maker import ImageMaker as ImageMaker
from .measured_images import InOrder as InOrder, MeasuredImages as MeasuredImages
from .mirroring import earlier as earlier, mirror as mirror, tracked as tracked
from .sampler_info import sampler_info as sampler_info, takes_noise as takes_noise
from .seeding import seeded as seeded
from .sheets import by_class as by_class, sheet as sheet
from .sinks import Call as Call
from .stopwatch import Span as Span, Stopwatch as Stopwatch, is_recording as is_recording, wait_for as wait_for
from .thinning import thin_curve as thin_curve
from .trial_passes import rehearsing as rehearsing, without_log as without_log
