from mdps.runtime.demo import demo_detector as demo_detector
from mdps.runtime.demo import demo_picture as demo_picture
from mdps.runtime.loading import load as load

__version__: str
